"""Requests that wait for a free place at a replica: one queue for each model, bounded in number and time.

Whoever frees a place hands it to the next waiter, taken already, so nobody can come between. Time is an argument but
for `WaitingRoom.wait`, which also is the only thing here that needs an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from gateway.errors import ModelBusy
from gateway.fairness import FairQueue, Ticket
from gateway.metrics import gauge
from gateway.replica_state import ReplicaState
from gateway.types import Tenant

CREDIT = 20_000.0  # tokens that a tenant of weight 1 can catch up on, after it has used less than its share
FADING = 0.95  # weight of what was measured before with every further place: about the last twenty count
ENOUGH = 5  # places that have to be seen before anybody is refused for want of them
STALE = 60.0  # seconds without a place handed out after which what was measured counts no more
LONGEST_HINT = 300.0  # seconds, the most a client is told to wait


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request waits for."""

    model: str  # whose queue
    tenant: Tenant
    work: float  # tokens it will cost, by estimate
    states: frozenset[ReplicaState]  # replicas that could serve it
    most: int  # requests that may wait for this model
    patience: float  # seconds
    again: bool = False  # it has failed somewhere already: it goes before its tenant's others


class Pace:
    """How fast places come free while somebody waits."""

    __slots__ = ("_places", "_seconds", "_seen", "since")

    def __init__(self) -> None:
        self._places = self._seconds = 0.0
        self._seen = 0
        self.since = 0.0  # the last place was handed out, or the first waiter came

    def begins(self, now: float) -> None:
        """Somebody waits, after a time in which nobody did."""
        if self.is_stale(now):
            self._places, self._seconds, self._seen = 0.0, 0.0, 0
        self.since = now

    def served(self, now: float) -> None:
        """A place was handed out."""
        self._places = self._places * FADING + 1
        self._seconds = self._seconds * FADING + now - self.since
        self._seen += 1
        self.since = now

    def wait(self, places: float, now: float) -> float | None:
        """Seconds until that many have been handed out; None while too few have been to tell."""
        if self._seen < ENOUGH:
            return None
        return places * (self._seconds + now - self.since) / (self._places + 1)

    def is_stale(self, now: float) -> bool:
        return now - self.since > STALE


class Line:
    """The queue of one model."""

    def __init__(self) -> None:
        self.queue: FairQueue[Waiter, ReplicaState] = FairQueue(CREDIT)
        self.pace = Pace()

    def busy(self, now: float) -> ModelBusy:
        """The refusal, with the time in which those who wait now and one more will have been served. Where that is not
        known, the time in which nobody was."""
        wait = self.pace.wait(self.queue.waiting + 1, now)
        return ModelBusy(min(max(now - self.pace.since if wait is None else wait, 1.0), LONGEST_HINT))


class Waiter:
    """One waiting request. `state` is the replica where a place was taken for it, None where it got none."""

    __slots__ = ("line", "state", "ticket", "trial", "wake", "wish")

    def __init__(self, line: Line, wish: Wish, wake: Callable[[], None]) -> None:
        self.line, self.wish, self.wake = line, wish, wake
        tenant = wish.tenant
        self.ticket: Ticket[Waiter, ReplicaState] = line.queue.push(
            self, tenant.name, wish.states,
            weight=tenant.weight, priority=tenant.priority, work=wish.work, front=wish.again,
        )  # fmt: skip
        self.state: ReplicaState | None = None
        self.trial = False  # what `ReplicaState.begin` returned


class WaitingRoom:
    """The queues of all models."""

    def __init__(self) -> None:
        self.depth = 0  # requests that wait, for any model: all that a request looks at while nobody does
        self._lines: dict[str, Line] = {}

    def wants(self, state: ReplicaState, priority: int) -> bool:
        """Whether somebody waits for that replica whom a request of this priority must not overtake."""
        line = self._lines.get(state.replica.model)
        return line is not None and line.queue.wants(state, priority)

    async def wait(self, wish: Wish) -> Waiter:
        """A waiter with a place. Whoever is cancelled meanwhile is forgotten, and a place it was just given goes on.

        Raises: ModelBusy when there are too many before it, or none came free in time.
        """
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        waiter = self.join(wish, time.monotonic(), lambda: None if woken.done() else woken.set_result(None))
        alarm = loop.call_later(wish.patience, self.leave, waiter)
        try:
            await woken
        except asyncio.CancelledError:
            self.leave(waiter)
            if waiter.state is not None:
                self._give_back(waiter, waiter.state)
            raise
        finally:
            alarm.cancel()
        if waiter.state is None:
            raise waiter.line.busy(time.monotonic())
        return waiter

    def join(self, wish: Wish, now: float, wake: Callable[[], None]) -> Waiter:
        """Takes a request into its queue. `wake` is called once: when it has a place (at once, if one is free that
        nobody before it can use) or has to go without.

        Raises: ModelBusy when there is no room to wait, or no hope within its patience.
        """
        line = self._lines.setdefault(wish.model, Line())
        queue, tenant = line.queue, wish.tenant
        self._hand_out(line, now)
        hope = line.pace.wait(queue.ahead(tenant.name, tenant.priority) + 1, now) if queue.waiting else None
        if hope is not None and hope > wish.patience and not wish.again:
            raise line.busy(now)
        if queue.waiting >= wish.most:
            displaced = queue.displace(tenant.name, tenant.weight, tenant.priority)
            if displaced is None:
                raise line.busy(now)
            self._left(displaced.item)
            displaced.item.wake()
        if not queue.waiting:
            line.pace.begins(now)
        waiter = Waiter(line, wish, wake)
        self.depth += 1
        for state in wish.states:
            state.wait_for(1)
        self._hand_out(line, now)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Ends a wait without a place. Nothing happens to one that has ended."""
        if waiter.ticket.waits:
            waiter.line.queue.remove(waiter.ticket)
            self._left(waiter)
            waiter.wake()

    def offer(self, state: ReplicaState, now: float) -> None:
        """A place there may have come free: hands out all it has, in order."""
        line = self._lines.get(state.replica.model)
        if line is not None:
            while state.has_room() and state.routable(now) and self._hand(line, state, now):
                pass

    def settle(self, waiter: Waiter, tokens: int) -> None:
        """What the request has cost in the end: its tenant's next one comes so much earlier or later."""
        waiter.line.queue.settle(waiter.ticket, tokens)

    def look_over(self, now: float) -> None:
        """Called a few times a second: hands out places that came free by time, by a probe or by a reload."""
        for name, line in list(self._lines.items()):
            if line.queue.waiting:
                self._hand_out(line, now)
            elif line.pace.is_stale(now):
                del self._lines[name]

    def _hand_out(self, line: Line, now: float) -> None:
        """Every free place somebody waits for, the one with the shortest wait first."""
        states = line.queue.servers()
        while free := [state for state in states if state.has_room() and state.routable(now)]:
            best = min(free, key=_wait)
            if not self._hand(line, best, now):
                states.discard(best)

    def _hand(self, line: Line, state: ReplicaState, now: float) -> bool:
        """Gives a place to the next one that can use it, if there is one."""
        ticket = line.queue.take(state)
        if ticket is None:
            return False
        waiter = ticket.item
        self._left(waiter)
        waiter.state, waiter.trial = state, state.begin()
        line.pace.served(now)
        waiter.wake()
        return True

    def _left(self, waiter: Waiter) -> None:
        self.depth -= 1
        for state in waiter.wish.states:
            state.wait_for(-1)

    def _give_back(self, waiter: Waiter, state: ReplicaState) -> None:
        state.end(waiter.trial)
        self.settle(waiter, 0)
        self.offer(state, time.monotonic())

    def gauges(self, models: Iterable[str]) -> Iterator[Metric]:
        depths = {(name,): 0.0 for name in models}
        depths |= {(name,): float(line.queue.waiting) for name, line in self._lines.items()}
        yield gauge("queue_depth", "Requests waiting for a free replica", ("model",), depths)


def _wait(state: ReplicaState) -> float:
    return state.wait
