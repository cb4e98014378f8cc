"""Carries the business of all parties to Redis, one batch at a time, and decides whether Redis is there.

When an answer fails or is late, waiting ends for everybody (the breaker is open). A probe every half second ends that:
it repeats the calls whose outcome is unknown, so nothing is booked twice and nothing that was granted is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from gateway.limits_redis.link import Link
from gateway.limits_redis.terms import LEASE, Call, Condition, Member, Party, Reply, Script, end

# An answer is late after five looks, 10 ms apart. Were it a single moment 50 ms away, a pause of this process itself
# would look like one of Redis: the answer is there, and nobody has had the time to read it.
_LOOKS = 5
_LOOK_EVERY = 0.01
_QUICK = 0.05  # seconds in which a probe has to be answered
_FIRST_PROBE = 0.1  # seconds after a failure
_PROBE_EVERY = 0.5
_MOST_PAUSE = 4.0  # seconds between probes of a store that comes and goes
_STEADY_AFTER = 10.0  # seconds for which it has to stay up, for the first probe to be a quick one again
_TICK = 0.25
_BATCH = 128  # calls
_SCRIPT = Script("alive.lua")

log = logging.getLogger("sekisho")


class Registry:
    """A `terms.Party` that says that this process lives, and counts those that do."""

    def __init__(self, process: str, condition: Condition) -> None:
        self._process, self._condition = process, condition
        self._said = 0.0
        self.leaves = False

    def prepare(self, moment: float) -> Call | None:
        self._said = moment
        return Call(_SCRIPT, "sekisho:alive", (self._process, int(LEASE * 1000), int(self.leaves)))

    def accept(self, reply: Reply, moment: float) -> None:
        assert isinstance(reply, int)
        self._condition.live = max(1, reply)

    def fail(self) -> None:
        pass

    def is_due(self, moment: float) -> bool:
        return moment - self._said >= LEASE / 3

    def tick(self, moment: float) -> bool:
        return True


class Courier:
    """A `terms.Desk`."""

    def __init__(self, link: Link, condition: Condition) -> None:
        self.process = secrets.token_hex(8)
        self._link, self._condition = link, condition
        self.registry = Registry(self.process, condition)
        self._due: dict[Party, None] = {}
        self._watched: set[Party] = set()
        self._under_way: list[Party] = []
        self._unanswered: dict[Party, None] = {}
        self._call = asyncio.Event()
        self._numbers = itertools.count(1)
        self._down_since = self._up_since = 0.0
        self._pause = _PROBE_EVERY
        self._reason = "no answer"
        self._tasks: list[asyncio.Task[None]] = []

    # --- what parties do
    def number(self) -> int:
        return next(self._numbers)

    def kick(self, party: Party) -> None:
        self._due[party] = None
        self._call.set()

    def watch(self, party: Party) -> None:
        self._watched.add(party)

    # --- life
    async def start(self) -> None:
        """Looks whether Redis is there, for two seconds at most."""
        self._down_since = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await self._probe()
        if not self._condition.up:
            self._complain()
        self._tasks = [asyncio.create_task(self._deliver()), asyncio.create_task(self._tick())]

    async def close(self, members: Collection[Member]) -> None:
        """Gives back all that members hold, as far as Redis takes it within two seconds."""
        await end(self._tasks)
        self._unanswered.update(dict.fromkeys(self._under_way))
        self._under_way = []
        self.registry.leaves = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                for _ in range(3):  # what an answer grants that was still due has to be given back as well
                    for member in members:
                        member.retire()
                    if not await self._hand_in({**self._unanswered, **self._due, self.registry: None}):
                        break
        self._condition.up = False
        await self._link.close()

    def _give_up(self, reason: str) -> None:
        """Nobody waits for Redis any longer. Those whose calls were under way repeat them when it is back."""
        self._condition.failures += 1
        self._reason = reason
        for party in (*self._under_way, *self._due):
            party.fail()
        if self._condition.up:
            self._condition.up = False
            self._down_since = time.monotonic()
            is_steady = self._down_since - self._up_since > _STEADY_AFTER
            self._pause = _FIRST_PROBE if is_steady else min(2 * self._pause, _MOST_PAUSE)
            self._complain()

    def _complain(self) -> None:
        log.error(
            "Redis is out of reach (%s): limits.on_store_failure is %r, and applies until it answers again",
            self._reason, self._condition.on_failure,
        )  # fmt: skip

    # --- the two tasks
    async def _deliver(self) -> None:
        while True:
            if not self._condition.up:
                await asyncio.sleep(self._pause)
                await self._probe()
                self._pause = max(self._pause, _PROBE_EVERY)
            elif self._due:
                await self._hand_in(itertools.islice(self._due, _BATCH))
            else:
                self._call.clear()
                await self._call.wait()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            moment = time.monotonic()
            for party in list(self._watched):
                is_busy = False
                with _faults_of(party):
                    is_busy = party.tick(moment)
                if not is_busy:
                    self._watched.discard(party)
            if self.registry.is_due(moment):
                self.kick(self.registry)

    async def _probe(self) -> None:
        """Closes the breaker when everything is answered, and without delay."""
        if not await self._hand_in([self.registry, *self._unanswered]):
            return
        begun = time.monotonic()
        if await self._hand_in([self.registry]) and time.monotonic() - begun < _QUICK:
            self._condition.up, self._up_since = True, time.monotonic()
            self._due.update(dict.fromkeys(self._watched))
            if self._tasks:
                log.warning("Redis answers again, after %.1f s", self._up_since - self._down_since)

    async def _hand_in(self, parties: Iterable[Party]) -> bool:
        """One batch. False when something went wrong."""
        self._under_way = list(parties)
        for party in self._under_way:
            self._due.pop(party, None)
            self._unanswered.pop(party, None)
        batch, moment, trouble = [], time.monotonic(), None
        for party in self._under_way:
            with _faults_of(party):
                call = party.prepare(moment)
                if call is not None:
                    batch.append((party, call))
        replies = await self._ask([call for _, call in batch]) if batch else []
        moment = time.monotonic()
        for (party, _), reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                trouble = reply
                self._unanswered[party] = None
            else:
                with _faults_of(party):
                    party.accept(reply, moment)
        if trouble is None:
            self._under_way = []
        else:
            self._give_up(_name(trouble))
        return trouble is None

    async def _ask(self, calls: Sequence[Call]) -> Sequence[Reply | Exception]:
        """Nobody else waits longer than for five looks; this goes on until the connection gives up."""
        loop, looks = asyncio.get_running_loop(), 0
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal looks, timer
            looks += 1
            if looks < _LOOKS:
                timer = loop.call_later(_LOOK_EVERY, look)
            else:
                self._give_up("it did not answer in time")

        timer = loop.call_later(_LOOK_EVERY, look)
        try:
            return await self._link.run(calls)
        finally:
            timer.cancel()


@contextlib.contextmanager
def _faults_of(party: Party) -> Iterator[None]:
    """A fault of ours costs those who wait for this party, and nobody else."""
    try:
        yield
    except Exception:
        log.exception("a limit is not shared because of a fault in the gateway")
        party.fail()


def _name(trouble: Exception) -> str:
    """What to tell of it: its kind, and the code that Redis gave. The rest may hold an address."""
    code = str(trouble).partition(" ")[0]
    return f"{type(trouble).__name__}, {code}" if code.isupper() and code.isalpha() else type(trouble).__name__
