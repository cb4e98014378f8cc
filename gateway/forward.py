"""From an admitted request to its answer: which models may serve it, a place at one of their replicas, a second try."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gateway.attempt import Attempt
from gateway.call import Call
from gateway.catalog import lookup, variant_note
from gateway.cycle import HotCycle
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
from gateway.fleet import ReplicaState
from gateway.hedge import Race
from gateway.limits import Lease, Limiter
from gateway.outcome import Outcome
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
    last: GatewayError | None = None
    refused: GatewayError | None = None  # by an engine, although one of another kind might have answered
    full: list[_Search] = []
    serving = outcome.model
    for search in _searches(now, outcome, full):
        model = search.model
        if model is not serving:
            serving = model
            lease.part(time.monotonic())  # the model before has served nothing
            try:
                if model.limits is not None:
                    await join_model(gateway.limiter, lease, call, model)
            except RateLimited as error:
                last = last or error
                continue
        tried = search.tried
        while search.attempts < MOST_ATTEMPTS:
            try:
                state, waiter = await _place(gateway, search, call, cycle, outcome)
            except (NoReplica, UnsupportedOperation, ContextTooLong) as error:
                if last is None or (search.patient and isinstance(last, NoReplica)):
                    last = error
                if search.can_wait and not search.patient:
                    full.append(search)
                break
            tried.append(state.replica.id)
            if not outcome.attempts:
                gateway.retries.asked()
            before = outcome.attempts
            outcome.attempts += 1
            attempt: Attempt | Race
            if now.hedge_after is None or call.operation.passes:
                attempt = Attempt(gateway, call, cycle, outcome, state)
            else:
                attempt = Race(gateway, model, call, cycle, outcome, state, tried, now.hedge_after)
            try:
                await attempt.run(None if waiter is None else waiter.trial)
                return
            except (UpstreamError, EngineBusy) as error:
                attempt.blame(error)
                if attempt.shown or not error.retryable:
                    raise
                last = error
            except (UnsupportedOperation, ContextTooLong) as error:
                if attempt.shown or not gateway.look_elsewhere(model, call, attempt.state.replica, error, tried):
                    raise
                refused = error
            finally:
                search.attempts += outcome.attempts - before
                if waiter is not None:
                    gateway.waiting.settle(waiter, outcome.usage.total if outcome.usage else 0)
                if gateway.waiting.depth:
                    gateway.waiting.offer(state, time.monotonic())  # only now is it known how the replica is doing
    last = last or refused or NoReplica("No replica of this model is available at the moment.", retry_after=5)
    if last.status == 503 and outcome.model is not None and outcome.principal is not None:
        last.message += variant_note(outcome.model, outcome.principal, now.names)
    raise last


async def _place(
    gateway: Gateway, search: _Search, call: Call, cycle: HotCycle, outcome: Outcome
) -> tuple[ReplicaState, Waiter | None]:
    """A replica for the next attempt, and whoever holds a place there if the request had to wait for it.

    Raises: NoReplica; UnsupportedOperation, ContextTooLong when no replica could ever honour the request.
    """
    model, principal = search.model, outcome.principal
    assert principal is not None
    try:
        state = gateway.find_place(model, call, search.tried, principal.tenant.priority)
    except NoReplica as error:
        patience = model.max_wait - outcome.queued
        states = gateway.prospects(model, call, search.tried) if model.max_waiting and patience > 0 else None
        search.can_wait = bool(states)
        if not states or not search.patient:
            raise
        _ask_for_retry(gateway, outcome)
        work, again = token_budget(call, model), outcome.attempts > 0
        wish = Wish(model.replicas[0].model, principal.tenant, work, states, model.max_waiting, patience, again)
        waiter = await _wait(gateway, wish, call, cycle, outcome, error)
        assert waiter.state is not None
        return waiter.state, waiter
    _ask_for_retry(gateway, outcome)
    return state, None


async def _wait(
    gateway: Gateway, wish: Wish, call: Call, cycle: HotCycle, outcome: Outcome, reason: NoReplica
) -> Waiter:
    """Raises: NoReplica, with the reason for the wait if it was in vain."""
    cycle.keepalives = call.stream and not call.operation.passes
    begun = time.monotonic()
    try:
        return await gateway.waiting.wait(wish)
    except ModelBusy as busy:
        raise busy if isinstance(reason, ModelBusy) else reason from None
    finally:
        outcome.queued += time.monotonic() - begun


def _ask_for_retry(gateway: Gateway, outcome: Outcome) -> None:
    """Raises: NoReplica when a second attempt would be one too many."""
    if outcome.attempts and not gateway.retries.take():
        raise NoReplica("Too many requests are being repeated at the moment.", retry_after=5)


class _Search:
    """One model's replicas, tried in turn."""

    __slots__ = ("attempts", "can_wait", "model", "patient", "tried")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tried: list[str] = []  # ids
        self.attempts = 0
        self.patient = False  # it waits for a place
        self.can_wait = False  # there is no place, but there may be one in time


def _searches(now: Snapshot, outcome: Outcome, full: list[_Search]) -> Iterator[_Search]:
    """The chain, and after it once more the first of those that the caller has put into `full`."""
    for model in _chain(now, outcome):
        yield _Search(model)
    if full:
        full[0].patient = True
        yield full[0]


def _chain(now: Snapshot, outcome: Outcome) -> Iterator[Model]:
    """The model and its fallbacks in the operator's order. Permission is checked for every target."""
    model, principal = outcome.model, outcome.principal
    assert model is not None and principal is not None
    yield model
    for name in model.fallbacks:
        other = lookup(name, principal, now.names)
        if other is not None:
            yield other
