"""From an admitted request to its answer: which models may serve it, a place at one of their replicas, a second try."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gateway.attempt import Attempt
from gateway.call import Call
from gateway.catalog import lookup, variant_note
from gateway.edge.cycle import HotCycle
from gateway.errors import (
    ContextTooLong,
    EngineBusy,
    GatewayError,
    ModelBusy,
    NoReplica,
    RateLimited,
    UnsupportedOperation,
    UpstreamError,
)
from gateway.hedge import Race
from gateway.limits import Lease, Limiter
from gateway.outcome import Outcome
from gateway.replica_state import ReplicaState
from gateway.snapshot import Snapshot
from gateway.state import Gateway
from gateway.types import Model
from gateway.waiting import Waiter, Wish

MOST_ATTEMPTS = 3  # per model of the fallback chain


def token_budget(call: Call, model: Model) -> int:
    """Tokens to set aside: the prompt by estimate, and as many completion tokens as the request allows."""
    if not call.operation.generates:
        return call.prompt_tokens
    completion = model.max_tokens_default if call.max_tokens is None else call.max_tokens
    return call.prompt_tokens + completion * call.answers


async def join_model(limiter: Limiter, lease: Lease, call: Call, model: Model) -> None:
    """Takes the model's own share of a request into the lease. Raises: RateLimited, StoreUnavailable."""
    assert model.limits is not None
    now = time.monotonic()
    await limiter.cover_request(model.limits, now)
    own = limiter.admit(model.limits, now)
    lease.join(own)  # from here on it is given back with the rest
    budget = token_budget(call, model)
    await limiter.cover_tokens(model.limits, budget, now)
    own.reserve(budget, now)


async def forward(gateway: Gateway, now: Snapshot, call: Call, cycle: HotCycle, outcome: Outcome, lease: Lease) -> None:
    """Tries replicas, then fallback models, until one has answered or the client has seen a part of an answer. Where
    none can take the request now, it waits for the first model whose replicas are only full."""
    serving = outcome.model
    assert serving is not None
    journey = _Journey(gateway, now, call, cycle, outcome)
    if await journey.asks(_Search(serving)):
        return
    for search in journey.further(serving):
        if search.model is not serving:
            serving = search.model
            lease.part(time.monotonic())  # the model before has served nothing
            try:
                if serving.limits is not None:
                    await join_model(gateway.limiter, lease, call, serving)
            except RateLimited as error:
                journey.last = journey.last or error
                continue
        if await journey.asks(search):
            return
    raise journey.failure()


class _Search:
    """One model's replicas, tried in turn."""

    __slots__ = ("attempts", "hopes", "model", "patient", "tried", "why")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tried: list[str] = []  # ids
        self.attempts = 0
        self.patient = False  # it waits for a place
        self.hopes: frozenset[ReplicaState] | None = None  # where there is no place, but may be one in time
        self.why: NoReplica | None = None  # there was none


class _Journey:
    """A request on its way to an answer, over all its attempts."""

    __slots__ = ("_call", "_cycle", "_full", "_gateway", "_now", "_outcome", "_refused", "last")

    def __init__(self, gateway: Gateway, now: Snapshot, call: Call, cycle: HotCycle, outcome: Outcome) -> None:
        self._gateway, self._now, self._call, self._cycle, self._outcome = gateway, now, call, cycle, outcome
        self.last: GatewayError | None = None
        self._refused: GatewayError | None = None  # by an engine, although one of another kind might have answered
        self._full: list[_Search] = []

    def further(self, model: Model) -> Iterator[_Search]:
        """The fallbacks in the operator's order, and after them once more the first model that was only full.
        Permission is checked for every target."""
        principal = self._outcome.principal
        assert principal is not None
        for name in model.fallbacks:
            other = lookup(name, principal, self._now.names)
            if other is not None:
                yield _Search(other)
        if self._full:
            self._full[0].patient = True
            yield self._full[0]

    def failure(self) -> GatewayError:
        """What the client is told after all of it."""
        model, principal = self._outcome.model, self._outcome.principal
        told = self.last or self._refused
        if told is None:
            told = NoReplica("No replica of this model is available at the moment.", retry_after=5)
        if told.status == 503 and model is not None and principal is not None:
            told.message += variant_note(model, principal, self._now.names)
        return told

    async def asks(self, search: _Search) -> bool:
        """Tries the model's replicas. Whether one has answered.

        Raises: GatewayError when nobody else may be asked any more.
        """
        while search.attempts < MOST_ATTEMPTS:
            waiter: Waiter | None = None
            try:
                state = self._place(search)
                if state is None:
                    waiter = await self._wait(search)
                    state = waiter.state
                    assert state is not None
            except (NoReplica, UnsupportedOperation, ContextTooLong) as error:
                if self.last is None or (search.patient and isinstance(self.last, NoReplica)):
                    self.last = error
                if search.hopes and not search.patient:
                    self._full.append(search)
                return False
            search.tried.append(state.replica.id)
            if await self._attempt(search, state, waiter):
                return True
        return False

    async def _attempt(self, search: _Search, state: ReplicaState, waiter: Waiter | None) -> bool:
        """Asks one replica. Whether it has answered. Raises: GatewayError when nobody else may be asked any more."""
        gateway, call, outcome, hedge_after = self._gateway, self._call, self._outcome, self._now.hedge_after
        before = outcome.attempts
        if not before:
            gateway.retries.asked()
        outcome.attempts += 1
        attempt: Attempt | Race
        if hedge_after is None or call.operation.passes:
            attempt = Attempt(gateway, call, self._cycle, outcome, state)
        else:
            attempt = Race(gateway, search.model, call, self._cycle, outcome, state, search.tried, hedge_after)
        try:
            await attempt.run(None if waiter is None else waiter.trial)
            return True
        except (UpstreamError, EngineBusy) as error:
            attempt.blame(error)
            if attempt.shown or not error.retryable:
                raise
            self.last = error
        except (UnsupportedOperation, ContextTooLong) as error:
            failed = attempt.state.replica
            if attempt.shown or not gateway.look_elsewhere(search.model, call, failed, error, search.tried):
                raise
            self._refused = error
        finally:
            search.attempts += outcome.attempts - before
            if waiter is not None:
                gateway.waiting.settle(waiter, outcome.usage.total if outcome.usage else 0)
            if gateway.waiting.depth:
                gateway.waiting.offer(state, time.monotonic())  # only now is it known how the replica is doing
        return False

    def _place(self, search: _Search) -> ReplicaState | None:
        """A replica for the next attempt; None if the request has to wait for one.

        Raises: NoReplica; UnsupportedOperation, ContextTooLong when no replica could ever honour the request.
        """
        outcome = self._outcome
        assert outcome.principal is not None
        state: ReplicaState | None = None
        try:
            priority = outcome.principal.tenant.priority
            state = self._gateway.find_place(search.model, self._call, search.tried, priority)
        except NoReplica as error:
            search.why, search.hopes = error, self._hopes(search)
            if not search.hopes or not search.patient:
                raise
        if outcome.attempts and not self._gateway.retries.take():
            raise NoReplica("Too many requests are being repeated at the moment.", retry_after=5)
        return state

    def _hopes(self, search: _Search) -> frozenset[ReplicaState] | None:
        """Replicas that are worth waiting for, if the model has a queue and the request has patience left."""
        if not search.model.max_waiting or self._patience(search) <= 0:
            return None
        return self._gateway.prospects(search.model, self._call, search.tried)

    def _patience(self, search: _Search) -> float:
        return search.model.max_wait - self._outcome.queued

    async def _wait(self, search: _Search) -> Waiter:
        """Raises: NoReplica, with the reason for the wait if it was in vain."""
        call, outcome, model = self._call, self._outcome, search.model
        assert outcome.principal is not None and search.hopes is not None and search.why is not None
        wish = Wish(
            model.replicas[0].model, outcome.principal.tenant, token_budget(call, model), search.hopes,
            model.max_waiting, self._patience(search), outcome.attempts > 0,
        )  # fmt: skip
        self._cycle.keepalives = call.stream and not call.operation.passes
        begun = time.monotonic()
        try:
            return await self._gateway.waiting.wait(wish)
        except ModelBusy as busy:
            raise busy if isinstance(search.why, ModelBusy) else search.why from None
        finally:
            outcome.queued += time.monotonic() - begun
