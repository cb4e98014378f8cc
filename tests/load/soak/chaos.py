"""What is done to the gateway while it serves, and what has to hold each time. Four lanes run beside each other."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.load.soak.clients import World, metric
from tests.load.soak.stage import Stage, available, new_key
from tests.load.soak.stage import frozen as freeze
from tests.servers.redis import Redis

TRIES = 8  # new connections that have to agree; both workers get some of them but for one run in 128
SLOWLY = 20.0  # seconds until a change that nobody waits for is in force
ENGINE_KILLS, CERTIFICATES, RELOADS, WORKER_KILLS = 6, 5, 20, 3
AFTERMATH = 2.0  # seconds after an event in which what ends still counts as of its phase
ENGINE_DOWN = 8.0  # seconds
FROZEN = 10.0

Act = Callable[[], Awaitable[str]]  # returns what is worth telling


class Event(NamedTuple):
    at: float  # seconds since the start
    phase: str
    act: Act


class Deed(NamedTuple):
    at: float
    phase: str
    took: float
    told: str


class Chaos:
    def __init__(self, world: World, stage: Stage, redis: Redis, minutes: float) -> None:
        self._world, self._stage, self._redis = world, stage, redis
        self._length = minutes * 60
        self._rng = random.Random(world.rng.random())
        self.deeds: list[Deed] = []
        self._one_death = asyncio.Lock()
        self._gone: str | None = None  # the key that was dropped last

    async def run(self) -> None:
        """Returns when all is done and undone."""
        await asyncio.gather(*(self._play(lane) for lane in self._lanes()))

    def _lanes(self) -> list[list[Event]]:
        """Workers are killed in the first half: what replaces them lives for the rest, which tells about memory."""
        kinds = itertools.cycle(("file", "signal", "api"))
        changes = itertools.cycle(
            (self._add_extra, self._add_key, self._drop_replica, self._drop_key, self._drop_extra, self._add_replica)
        )
        reloads = [self._reload(next(changes), next(kinds)) for _ in range(RELOADS)]
        reloads.insert(5, self._break_with_unknown_key)
        reloads.insert(15, self._break_syntax)
        killers = [self._worker_killer(place % self._stage.workers) for place in range(WORKER_KILLS)]
        broken = (self._break_with_unknown_key, self._break_syntax)
        names = ["invalid" if act in broken else "reload" for act in reloads]
        return [
            self._spread("engine killed", [self._kill_engine] * ENGINE_KILLS, 0.06, 0.94),
            self._spread("certificate", [self._renew] * CERTIFICATES, 0.09, 0.9),
            [
                event._replace(phase=name)
                for event, name in zip(self._spread("", reloads, 0.04, 0.96), names, strict=True)
            ],
            self._spread("worker killed", killers, 0.1, 0.45),
            [
                Event(self._length * 0.55, "redis frozen", self._freeze_redis),
                Event(self._length * 0.75, "redis restarted", self._restart_redis),
            ],
        ]

    def _spread(self, phase: str, acts: Sequence[Act], begin: float, end: float) -> list[Event]:
        """Evenly between two parts of the run, give or take a quarter of the distance."""
        step = (end - begin) / len(acts)
        return [
            Event((begin + step * (place + self._rng.uniform(0.25, 0.75))) * self._length, phase, act)
            for place, act in enumerate(acts)
        ]

    async def _play(self, lane: Sequence[Event]) -> None:
        world = self._world
        for event in lane:
            await asyncio.sleep(max(0.0, world.began + event.at - time.monotonic()))
            with self._phase(event.phase):
                begun = time.monotonic()
                try:
                    told = await event.act()
                except Exception as error:
                    told = f"FAILED: {type(error).__name__}: {error}"
                    world.complain(f"chaos: {told}")
                self.deeds.append(Deed(begun - world.began, event.phase, time.monotonic() - begun, told))
                await asyncio.sleep(AFTERMATH)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._world.phases.append(name)
        try:
            yield
        finally:
            self._world.phases.remove(name)

    # --- engines
    async def _kill_engine(self) -> str:
        """Not while a worker is replaced: all its streams begin anew in one moment, and if a third of those fail in the
        next one, there are more of them than may be repeated (`routing.retry_budget`)."""
        async with self._one_death:
            return await self._kill_some_engine()

    async def _kill_some_engine(self) -> str:
        engine = self._rng.choice(self._stage.engines)
        self._world.deeds.engines[engine.number].append(time.monotonic())
        await asyncio.to_thread(engine.kill)
        await asyncio.sleep(min(ENGINE_DOWN, self._length / 40))
        engine.start()
        await _eventually(lambda: asyncio.to_thread(available, [engine.port]), SLOWLY, "the engine is back")
        return f"engine {engine.number}"

    # --- certificates
    async def _renew(self) -> str:
        serial, begun = await asyncio.to_thread(self._stage.renew_certificate), time.monotonic()

        async def shown() -> bool:
            return await self._all_show(serial)

        await _eventually(shown, SLOWLY, "new connections are shown the new certificate")
        return f"shown after {time.monotonic() - begun:.1f} s"

    async def _all_show(self, serial: int) -> bool:
        found = [await self._world.get("/health") for _ in range(TRIES)]
        return all(wire is not None and wire.serial == serial for _, wire in found)

    # --- configuration
    def _reload(self, change: Callable[[], Awaitable[Callable[[], None]]], kind: str) -> Act:
        async def act() -> str:
            name = change.__name__.lstrip("_").replace("_", " ")
            afterwards = await change()
            took = await self._put_in_force(kind)
            afterwards()
            return f"{name} by {kind}, in force after {took:.1f} s"

        return act

    async def _add_extra(self) -> Callable[[], None]:
        self._stage.wanted.extra = True

        def afterwards() -> None:
            self._world.extra = True

        return afterwards

    async def _drop_extra(self) -> Callable[[], None]:
        self._world.extra = False
        await self._nobody_waits(model="extra")
        self._stage.wanted.extra = False
        return lambda: None

    async def _drop_replica(self) -> Callable[[], None]:
        self._stage.wanted.third = False
        return lambda: None

    async def _add_replica(self) -> Callable[[], None]:
        self._stage.wanted.third = True
        return lambda: None

    async def _add_key(self) -> Callable[[], None]:
        key = new_key()
        self._stage.wanted.keys["alpha"].append(key)

        def afterwards() -> None:
            self._world.keys["alpha"] = [key]

        return afterwards

    async def _drop_key(self) -> Callable[[], None]:
        old = self._stage.wanted.keys["alpha"][0]
        await self._nobody_waits(key=old)
        del self._stage.wanted.keys["alpha"][0]
        self._gone = old
        return lambda: None

    async def _nobody_waits(self, model: str = "", key: str = "") -> None:
        """What was asked before has begun, so what is taken away now is taken from nobody."""

        async def begun() -> bool:
            return not any(one.model == model or one.key == key for one in self._world.waiting)

        await _eventually(begun, 60.0, f"requests of {model or 'the old key'} have begun")

    async def _put_in_force(self, kind: str) -> float:
        """Seconds until every new connection sees it. The admin API promises that it is so when it answers."""
        self._stage.write()
        begun = time.monotonic()
        if kind == "api":
            answer, _ = await self._world.get("/admin/v1/reload", self._world.admin_key, "POST")
            if answer.status != 200:
                raise AssertionError(f"the reload was answered {answer.status}: {bytes(answer.body).decode()}")
            if not await self._is_in_force():
                raise AssertionError("the reload was answered before it was in force everywhere")
        else:
            if kind == "signal":
                self._stage.hang_up()
            await _eventually(self._is_in_force, SLOWLY, f"the change by {kind} is in force")
        return time.monotonic() - begun

    async def _is_in_force(self) -> bool:
        world, wanted = self._world, self._stage.wanted
        models = {"m", "extra"} if wanted.extra else {"m"}
        replicas = 3 if wanted.third else 2
        for _ in range(TRIES):
            answer, _ = await world.get("/admin/v1/models", world.admin_key)
            entries = json.loads(answer.body)["data"] if answer.status == 200 else []
            found = {entry["id"]: len(entry["replicas"]) for entry in entries}
            if set(found) != models or found.get("m") != replicas:
                return False
            answer, _ = await world.get("/v1/models", wanted.keys["alpha"][-1])
            if answer.status != 200:
                return False
        return self._gone in (None, *wanted.keys["alpha"]) or await self._nobody_knows(self._gone)

    async def _nobody_knows(self, key: str | None) -> bool:
        found = [await self._world.get("/v1/models", key) for _ in range(TRIES)]
        return all(answer.status == 401 for answer, _ in found)

    async def _break_with_unknown_key(self) -> str:
        """Written down, and nothing else: the gateway finds it by itself."""
        document = self._stage.wanted.document()
        document["models"][0]["polcy"] = "round_robin"
        return await self._refused(json.dumps(document), ask=False)

    async def _break_syntax(self) -> str:
        return await self._refused('{"models": [', ask=True)

    async def _refused(self, text: str, ask: bool) -> str:
        world = self._world
        before = metric(world.totals, "sekisho_config_reloads_total", 'result="failure"')
        self._stage.write(text)
        if ask:
            answer, _ = await world.get("/admin/v1/reload", world.admin_key, "POST")
            if answer.status != 400 or b"invalid_configuration" not in answer.body:
                raise AssertionError(f"answered {answer.status}: {bytes(answer.body).decode()}")

        async def counted() -> bool:
            return metric(world.totals, "sekisho_config_reloads_total", 'result="failure"') > before

        await _eventually(counted, SLOWLY, "the invalid configuration is counted")
        if not await self._is_in_force():
            raise AssertionError("the old configuration did not stay in force")
        await self._put_in_force("file")
        return "refused, the old one stayed"

    # --- workers
    def _worker_killer(self, number: int) -> Act:
        async def act() -> str:
            async with self._one_death:
                told = await self._kill_worker(number)
                await asyncio.sleep(AFTERMATH)
                return told

        return act

    async def _kill_worker(self, number: int) -> str:
        world = self._world
        process = self._stage.members()[number]
        ports = await asyncio.to_thread(freeze, process)
        now = time.monotonic()
        world.deeds.workers.append(now)
        for port in ports:
            world.deeds.ports[port].append(now)
        process.send_signal(signal.SIGKILL)
        slowest = 0.0
        for _ in range(TRIES):  # new connections have to work at once, at whichever worker's socket they arrive
            begun = time.monotonic()
            answer, _ = await world.get("/v1/models", world.keys["gamma"][0])
            if answer.complete and answer.status != 200:
                raise AssertionError(f"a new connection got {answer.status}: {bytes(answer.body).decode()}")
            slowest = max(slowest, time.monotonic() - begun)

        async def all_serve() -> bool:
            return world.gauges.get("sekisho_workers") == self._stage.workers and self._replaced(number, process.pid)

        await _eventually(all_serve, 60.0, "the worker is replaced")
        return (
            f"worker {number} with {len(ports)} connections, replaced after {time.monotonic() - now:.1f} s, "
            f"slowest new connection {slowest:.1f} s"
        )

    def _replaced(self, number: int, pid: int) -> bool:
        process = self._stage.members().get(number)
        return process is not None and process.pid != pid

    # --- Redis
    async def _freeze_redis(self) -> str:
        self._redis.pause()
        await asyncio.sleep(min(FROZEN, self._length / 10))
        self._redis.resume()
        await self._limits_shared()
        return "shared again"

    async def _restart_redis(self) -> str:
        await asyncio.to_thread(self._redis.restart)
        await self._limits_shared()
        return "shared again"

    async def _limits_shared(self) -> None:
        async def shared() -> bool:
            return self._world.gauges.get("sekisho_limit_store_up") == 1

        await asyncio.sleep(2.5)  # a scrape after the event, not one before it
        await _eventually(shared, 60.0, "limits are shared again")


async def _eventually(check: Callable[[], Awaitable[bool]], patience: float, what: str) -> None:
    """Raises: AssertionError."""
    deadline = time.monotonic() + patience
    while not await check():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience:.0f} s: {what}")
        await asyncio.sleep(0.1)
