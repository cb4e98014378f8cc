"""The callers of the soak: streams that are always open, requests at a steady rate, and those who watch the gateway."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.load.soak import verdict
from tests.load.soak.verdict import Asked, Deeds
from tests.load.soak.wire import Answer, NoConnection, Wire

IDLE = 20.0  # seconds after which a kept connection is not used again; the gateway closes it after 75
LEAVING = 0.01  # share of clients that go away in the middle
MOST_IDLE = 50  # kept connections
KEPT = 0.5  # share of requests that go over a kept connection
EXTRA = 0.1  # share of requests for the model that comes and goes
PATIENCE = 60.0  # seconds beyond the time that an engine takes
MOST_UNEXPECTED = 500  # kept with their text


class Line(NamedTuple):
    """One request in the clients' own books."""

    outcome: str
    tenant: str
    phase: str
    request_id: str  # empty when no head came
    status: int
    tokens: int
    began: float
    ended: float
    port: int
    opened: float
    first: float  # seconds until the head


@dataclass
class World:
    """What clients and chaos share."""

    port: int
    context: ssl.SSLContext
    admin_key: str
    keys: dict[str, list[str]]  # tenant -> keys in force
    rng: random.Random
    deeds: Deeds = field(default_factory=Deeds)
    extra: bool = False  # the model of that name may be asked for
    phases: list[str] = field(default_factory=list)  # what is being done to the gateway
    began: float = field(default_factory=time.monotonic)
    lines: list[Line] = field(default_factory=list)
    unexpected: list[tuple[float, str, str]] = field(default_factory=list)  # seconds since the start, phase, text
    amiss: int = 0  # how many there were
    waiting: set[Asked] = field(default_factory=set)  # requests whose head has not come
    open_streams: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    totals: dict[str, float] = field(default_factory=dict)  # of the last scrape
    pages: int = 0
    gauges: dict[str, float] = field(default_factory=dict)
    idle: list[Wire] = field(default_factory=list)

    @property
    def phase(self) -> str:
        return self.phases[-1] if self.phases else "quiet"

    def complain(self, text: str) -> None:
        self.amiss += 1
        if len(self.unexpected) < MOST_UNEXPECTED:
            at, phase = time.monotonic() - self.began, ", ".join(self.phases) or "quiet"
            self.unexpected.append((at, phase, text))
            print(f"{at:7.1f} s  UNEXPECTED [{phase}]  {text}", flush=True)

    async def fresh(self) -> Wire:
        return await Wire.open(self.port, self.context)

    async def wire(self) -> Wire:
        """A kept connection, or now and then a new one. Raises: NoConnection."""
        while self.idle and self.rng.random() < KEPT:
            wire = self.idle.pop()
            if not wire.closed and time.monotonic() - wire.used < IDLE:
                return wire
            wire.close()
        return await self.fresh()

    def keep(self, wire: Wire) -> None:
        if not wire.closed and len(self.idle) < MOST_IDLE:
            self.idle.append(wire)
        else:
            wire.close()

    async def get(self, path: str, key: str | None = None, method: str = "GET") -> tuple[Answer, Wire | None]:
        """Over a connection of its own; asked again where its worker was killed. Without an answer that is noted."""
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        credential = f"authorization: Bearer {key}\r\n" if key else ""
        length = "content-length: 0\r\n" if method == "POST" else ""
        for _ in range(5):
            wire: Wire | None = None
            try:
                wire = await self.fresh()
                answer = await wire.ask(f"{head}{credential}{length}\r\n".encode(), PATIENCE)
                wire.close()
            except NoConnection as failure:
                answer = failure.answer
            if answer.complete or not self.deeds.killed_worker(answer):
                break
        if not answer.complete:
            self.complain(f"{method} {path}: {answer.problem}")
        return answer, wire


class Callers:
    """Those who ask models."""

    def __init__(self, world: World, shortest: float, longest: float) -> None:
        """`shortest`, `longest`: seconds of a stream."""
        self._world, self._shortest, self._longest = world, shortest, longest
        self._number = 0

    async def keep_open(self, streams: int, ramp: float) -> None:
        """`streams` of them at any time until the end; returns when the last one has ended. `ramp`: seconds."""
        await asyncio.gather(*(self._seat(ramp * place / streams) for place in range(streams)))

    async def _seat(self, delay: float) -> None:
        world, rng = self._world, self._world.rng
        if await _stopped(world, delay):
            return
        while not world.stopping.is_set():
            pace = rng.uniform(0.05, 0.2)
            length = rng.uniform(self._shortest, self._longest)
            asked = self._asked(int(length / pace), stream=True)
            world.open_streams += 1
            outcome = await self._one(asked, pace, rng.uniform(0.1, 1.0))
            world.open_streams -= 1
            if outcome == verdict.UNEXPECTED:
                await asyncio.sleep(1)

    async def ask_steadily(self, rate: float, small: bool = False) -> None:
        """Requests that are no streams, whether or not earlier ones are answered. `small`: of the limited tenant."""
        world, begun, tasks, number = self._world, time.monotonic(), set[asyncio.Task[Any]](), 0
        while not await _stopped(world, max(0.0, begun + number / rate - time.monotonic())):
            number += 1
            asked = self._asked(world.rng.randint(1, 40), stream=False, small=small)
            task = asyncio.create_task(self._one(asked, 0.0, world.rng.uniform(0.02, 0.6)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    def _asked(self, tokens: int, *, stream: bool, small: bool = False) -> Asked:
        world, rng = self._world, self._world.rng
        tenant = "small" if small else rng.choice([name for name in world.keys if name != "small"])
        model = "extra" if world.extra and not small and rng.random() < EXTRA else rng.choice(("m", "chat"))
        self._number += 1
        return Asked(
            tenant, rng.choice(world.keys[tenant]), model, f"n{self._number}", max(2, tokens), stream,
            wants_usage=stream and rng.random() < 0.5, may_be_limited=small,
        )  # fmt: skip

    async def _one(self, asked: Asked, pace: float, wait: float) -> str:
        world, rng = self._world, self._world.rng
        takes = wait + asked.tokens * pace
        leave_after = rng.uniform(0.01, takes) if rng.random() < LEAVING else None
        world.waiting.add(asked)
        try:
            wire = await world.wire()
            wire.headed = lambda: world.waiting.discard(asked)
            answer = await wire.ask(_request(asked, pace, wait), takes * 1.5 + PATIENCE, leave_after)
            if answer.complete:
                world.keep(wire)
            else:
                wire.close()
        except NoConnection as failure:
            answer = failure.answer
        finally:
            world.waiting.discard(asked)
        outcome, text = verdict.judge(asked, answer, world.deeds)
        if text:
            kind = "stream" if asked.stream else "request"
            world.complain(f"{kind} {answer.headers.get(b'x-request-id', b'').decode()} of {asked.tenant}: {text}")
        world.lines.append(
            Line(
                outcome, asked.tenant, world.phase, answer.headers.get(b"x-request-id", b"").decode(), answer.status,
                asked.tokens, answer.began, answer.ended, answer.port, answer.opened,
                answer.headed - answer.began if answer.headed else 0.0,
            )
        )  # fmt: skip
        return outcome


class Watchers:
    """Those who look at the gateway each second, as Prometheus and a load balancer do."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def scrape(self) -> None:
        """Until the end: no counter falls, and none disappears, whichever worker is met."""
        world = self._world
        while not await _stopped(world, 1.0):
            await self.read_metrics()

    async def read_metrics(self) -> None:
        world = self._world
        answer, _ = await world.get("/metrics", world.admin_key)
        if answer.status != 200:
            if answer.complete:
                world.complain(f"/metrics answers {answer.status}")
            return
        counters, world.gauges = _samples(bytes(answer.body).decode())
        for name, before in world.totals.items():
            now = counters.get(name)
            if now is None or now < before:
                world.complain(f"the counter {name} went from {before:g} to {now}")
        world.totals = counters
        world.pages += 1

    async def probe(self, path: str) -> None:
        world = self._world
        while not await _stopped(world, 1.0):
            answer, _ = await world.get(path)
            if answer.complete and answer.status != 200:
                world.complain(f"{path} answers {answer.status} {bytes(answer.body).decode()}")


def metric(totals: dict[str, float], name: str, *labels: str) -> float:
    """The sum of the samples of that name with these labels, such as 'tenant="alpha"'."""
    return sum(
        value for sample, value in totals.items()
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )  # fmt: skip


def _samples(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Counters and histograms, and gauges, of a page: sample with its labels -> value."""
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    found = gauges
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found = counters if line.endswith((" counter", " histogram")) else gauges
        elif line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            if not sample.partition("{")[0].endswith("_created"):
                found[sample] = float(value)
    return counters, gauges


def _request(asked: Asked, pace: float, wait: float) -> bytes:
    order = {"nonce": asked.nonce, "tokens": asked.tokens, "pace": round(pace, 4), "wait": round(wait, 4)}
    body: dict[str, Any] = {
        "model": asked.model, "messages": [{"role": "user", "content": json.dumps(order)}], "max_tokens": asked.tokens,
    }  # fmt: skip
    if asked.stream:
        body |= {"stream": True} | ({"stream_options": {"include_usage": True}} if asked.wants_usage else {})
    data = json.dumps(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {asked.key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n{data}".encode()


async def _stopped(world: World, seconds: float) -> bool:
    """Waits that long, or until the end. Whether it is the end."""
    try:
        await asyncio.wait_for(world.stopping.wait(), seconds)
    except TimeoutError:
        return False
    return True
