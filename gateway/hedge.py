"""A second replica for a request that has waited for its first byte: whoever answers first answers alone.

Off unless `routing.hedge_after` is set. The engine that loses has worked for nothing, and nobody is charged for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from copy import copy

from gateway.attempt import Attempt, route_headers
from gateway.call import Call
from gateway.edge.cycle import HotCycle
from gateway.errors import EngineBusy, GatewayError, UpstreamError
from gateway.outcome import Outcome
from gateway.replica_state import ReplicaState
from gateway.state import Gateway
from gateway.types import Model


class Lane(HotCycle):
    """Where one of the two answers goes: to the client once it has won, and nowhere before and otherwise."""

    def __init__(self, race: Race, cycle: HotCycle) -> None:
        self.operation, self.headers, self.request_id = cycle.operation, cycle.headers, cycle.request_id
        self._race, self._cycle = race, cycle
        self._flow: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._head_due = False

    def open(self) -> None:
        """It has won."""
        if self._flow is not None:
            self._cycle.attach(*self._flow)
        if self._head_due and not self._cycle.started:
            self._cycle.begin()

    # --- what an attempt writes
    def attach(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._flow = pause, resume
        if self._race.is_won_by(self):
            self._cycle.attach(pause, resume)

    def detach(self) -> None:
        self._flow = None
        if self._race.is_won_by(self):
            self._cycle.detach()

    def begin(self) -> None:
        self._head_due = True  # the head says who answers, so it waits for that
        if self._race.is_won_by(self) and not self._cycle.started:
            self._cycle.begin()

    def received(self, data: bytes) -> None:
        if self._race.wins(self):
            self._cycle.received(data)

    def end(self, data: bytes = b"") -> None:
        if self._race.wins(self, whole=True):
            self._cycle.end(data)

    def answer(self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json") -> None:
        if self._race.wins(self, whole=True):
            self._cycle.answer(status, body, headers, content_type)


class Entry:
    """One replica in the race."""

    __slots__ = ("attempt", "begun", "lane", "record", "task", "trial")

    def __init__(self, attempt: Attempt, lane: Lane, record: Outcome, trial: bool) -> None:
        self.attempt, self.lane, self.record, self.trial = attempt, lane, record, trial
        self.begun = False  # a task that is cancelled before its first step gives nothing back by itself
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        self.begun = True
        await self.attempt.run(self.trial)


class Race:
    """In place of one `Attempt`: up to two of them at once, for the same client.

    `state` is the replica whose answer or error counts, `shown` whether the client has seen an event of it.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: Model,
        call: Call,
        cycle: HotCycle,
        outcome: Outcome,
        state: ReplicaState,
        tried: list[str],
        after: float,
    ) -> None:
        """`tried`: ids of replicas that are not to be asked; a second one is added. `after`: seconds."""
        self._gateway, self._model, self._call = gateway, model, call
        self._cycle, self._outcome = cycle, outcome
        self._tried, self._after = tried, after
        self._entries: list[Entry] = []
        self._winner: Entry | None = None
        self.state = state

    @property
    def shown(self) -> bool:
        return self._winner is not None and self._winner.attempt.shown

    def blame(self, error: GatewayError) -> None:
        """Each replica is blamed when it fails, and not when the race is over."""

    async def run(self, trial: bool | None = None) -> None:
        """`trial`: what `ReplicaState.begin` has returned for the first replica, where a place was taken before.

        Raises: GatewayError, the better one if both have failed.
        """
        self._cycle.keepalives = self._call.stream
        try:
            first = self._enter(self.state, trial)
            await asyncio.wait((first.task,), timeout=self._after)
            if self._winner is None and not first.task.done():
                self._widen(first)
            await self._finish()
        except asyncio.CancelledError:
            await self._stop()
            # Whoever leaves pays for what one of the two has done.
            self._settle(self._winner or next((entry for entry in self._entries if entry.record.usage), first))
            raise
        finally:
            await self._stop()

    # --- who takes part
    def _enter(self, state: ReplicaState, trial: bool | None) -> Entry:
        record, lane = copy(self._outcome), Lane(self, self._cycle)
        attempt = Attempt(self._gateway, self._call, lane, record, state)
        entry = Entry(attempt, lane, record, state.begin() if trial is None else trial)
        entry.task.add_done_callback(lambda _: self._left(entry))
        self._entries.append(entry)
        return entry

    def _left(self, entry: Entry) -> None:
        """Called once an attempt is over, however it ended."""
        if not entry.begun:
            entry.attempt.state.end(entry.trial)
        if entry.task.cancelled():
            self._offer(entry)
        else:
            entry.task.exception()  # a loser's is nobody's business

    def _offer(self, entry: Entry) -> None:
        """Its place is free; to be called when it is known how its replica is doing."""
        waiting = self._gateway.waiting
        if waiting.depth:
            waiting.offer(entry.attempt.state, time.monotonic())

    def _widen(self, first: Entry) -> None:
        """Asks a second replica if there is one with room, and a retry to spare. Else the first goes on alone."""
        outcome = self._outcome
        assert outcome.principal is not None
        priority = outcome.principal.tenant.priority
        state: ReplicaState | None
        try:
            state = self._gateway.find_place(self._model, self._call, self._tried, priority)
        except GatewayError:
            state = None
        if state is None or not self._gateway.retries.take():
            self._decide(first)
            return
        self._tried.append(state.replica.id)
        outcome.attempts += 1
        self._enter(state, None)

    # --- who wins
    def is_won_by(self, lane: Lane) -> bool:
        return self._winner is not None and self._winner.lane is lane

    def wins(self, lane: Lane, *, whole: bool = False) -> bool:
        """Whether what comes on this lane goes to the client. Its first event decides, or its end; a comment does not,
        since engines send them while they read the prompt."""
        if self._winner is None:
            entry = next(entry for entry in self._entries if entry.lane is lane)
            if whole or entry.attempt.shown:
                self._decide(entry)
        return self.is_won_by(lane)

    def _decide(self, winner: Entry) -> None:
        self._winner = winner
        for entry in self._entries:
            if entry is not winner:
                entry.task.cancel()
        self._announce(winner)
        winner.lane.open()

    def _announce(self, entry: Entry) -> None:
        entry.record.attempts = self._outcome.attempts
        self._cycle.route_headers = route_headers(entry.record, expose=self._gateway.snapshot.expose_route)

    async def _finish(self) -> None:
        """Waits for the winner, or until all have failed. Raises: GatewayError."""
        failed: list[tuple[GatewayError, Entry]] = []
        racing = {entry.task: entry for entry in self._entries}
        while racing:
            done, _ = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            for entry in [racing.pop(task) for task in done]:
                error = self._error_of(entry)
                if error is not None and entry is self._winner:
                    self._lose(error, entry)
                elif error is not None:
                    failed.append((error, entry))
                elif entry is self._winner:
                    self._settle(entry)
                    return
        self._lose(*min(failed, key=_rank))

    def _error_of(self, entry: Entry) -> GatewayError | None:
        """Why it has failed, with its replica blamed; None where it has answered, or was told to stop."""
        error = None if entry.task.cancelled() else entry.task.exception()
        if isinstance(error, UpstreamError | EngineBusy):
            entry.attempt.blame(error)
        elif error is not None and not isinstance(error, GatewayError):
            raise error
        self._offer(entry)
        return error

    def _lose(self, error: GatewayError, entry: Entry) -> None:
        self.state = entry.attempt.state
        self._settle(entry)
        self._announce(entry)
        raise error

    def _settle(self, entry: Entry) -> None:
        """What counts of the whole race is what one replica has done."""
        outcome, record = self._outcome, entry.record
        outcome.replica, outcome.usage, outcome.status = record.replica, record.usage, record.status
        outcome.sent, outcome.first_token = record.sent, record.first_token
        outcome.upstream_ended, outcome.tools_stripped = record.upstream_ended, record.tools_stripped
        self.state = entry.attempt.state

    async def _stop(self) -> None:
        """Ends whatever still runs, places and connections given back."""
        running = [entry.task for entry in self._entries if not entry.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


def _rank(failure: tuple[GatewayError, Entry]) -> tuple[bool, bool, int]:
    """The caller's own mistake before anything else, then what says when to come again."""
    error = failure[0]
    return error.retryable, error.retry_after is None, error.status
