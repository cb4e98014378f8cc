"""What the parts of this package say to each other: calls of scripts, tickets of who waits, the state of Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

LEASE = 10.0  # seconds that slots and a place among the living last without being renewed
MARGIN = 0.001  # seconds by which what is held ends early: between a check and its use a moment passes
MOST_TICKETS = 64  # per call, so that no script runs for long

Reply = list[int] | int


class Script:
    """A Lua file of this folder and the name that Redis gives it."""

    __slots__ = ("digest", "text")

    def __init__(self, file: str) -> None:
        self.text = Path(__file__).with_name(file).read_text("utf-8")
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Call(NamedTuple):
    """One run of a script, on one key: all that a cluster allows."""

    script: Script
    key: str
    args: tuple[str | int, ...]


class Ticket:
    """A request that waits for room."""

    __slots__ = ("abandoned", "cost", "done", "granted", "is_refused", "may_be_late", "slice", "wait")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.granted = False  # and not yet claimed
        self.slice = 0  # in which the grant was booked
        self.is_refused = False
        self.wait = 0.0  # seconds until it fits; 0 when the store has not said
        self.abandoned = False  # nobody waits for an answer
        self.may_be_late = False  # it counts although its slice may have ended: this process is too busy to be in time

    def grant(self, slice: int = 0) -> None:
        self.granted, self.slice = True, slice
        self._settle()

    def refuse(self, wait: float = 0.0) -> None:
        self.is_refused, self.wait = True, wait
        self._settle()

    def try_again(self) -> None:
        """It came to nothing, and that says nothing."""
        self._settle()

    def _settle(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Party(Protocol):
    """Whoever has business with Redis. At most one call of a party is under way at a time."""

    def prepare(self, moment: float) -> Call | None:
        """The next call, or the last one again when its answer never came. `moment`: a steady clock's seconds."""

    def accept(self, reply: Reply, moment: float) -> None: ...
    def fail(self) -> None:
        """Stops those who wait. What became of a call that was under way is unknown."""

    def tick(self, moment: float) -> bool:
        """A few times a second while the party is watched. False: it needs no more watching."""


class Member(Party, Protocol):
    """A party that holds something of the store's."""

    def retire(self) -> None:
        """Gives back all of it, at the end of the process."""


class Desk(Protocol):
    """Where parties hand in their business."""

    process: str

    def number(self) -> int:
        """1, 2, 3 ... over all calls of this process."""

    def kick(self, party: Party) -> None:
        """`party` is asked for its call at the next occasion."""

    def watch(self, party: Party) -> None:
        """`party.tick` is called from now on."""


@dataclass(slots=True)
class Condition:
    """How Redis is, and what this process does without it."""

    on_failure: str  # local, allow or refuse
    up: bool = False
    live: int = 1  # processes that share the counters, when they were last counted
    failures: int = 0
    draws: int = 0

    def share(self, whole: int) -> int:
        """What this process may use of a limit while it counts alone."""
        return max(1, whole // self.live)

    @property
    def divisor(self) -> int:
        """At most one part in so many of what is left is drawn in store."""
        return max(8, 2 * self.live)


def live_tickets(queue: list[Ticket]) -> Sequence[Ticket]:
    """Takes the first of those who still wait out of a queue."""
    waiting = [ticket for ticket in queue if not ticket.abandoned]
    queue[:] = waiting[MOST_TICKETS:]
    return waiting[:MOST_TICKETS]


@dataclass(slots=True)
class Sent:
    """A call that is under way or was never answered."""

    call: Call
    moment: float  # before it was sent
    tickets: Sequence[Ticket] = field(default=())


async def end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Ends tasks that talk to Redis. Its client swallows a cancellation now and then, so one may not be enough."""
    pending = set(tasks)
    for _ in range(10):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.3)
