"""The whole path of a request, top to bottom: docs/architecture.md follows `serve` line by line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from backends.base import Operation
from gateway.attempt import PARSE_IN_THREAD_ABOVE, PARSER, Attempt
from gateway.call import Call, parse_call
from gateway.catalog import lookup, resolve, variant_note
from gateway.cycle import HotCycle
from gateway.errors import (
    ClientGone,
    EngineBusy,
    GatewayError,
    Internal,
    NoReplica,
    RateLimited,
    ShuttingDown,
    UnsupportedOperation,
    UpstreamError,
)
from gateway.fit import too_long
from gateway.formcall import parse_form
from gateway.limits import Lease, Limiter
from gateway.media import check_media
from gateway.outcome import Outcome
from gateway.snapshot import Snapshot
from gateway.state import Gateway
from gateway.types import Model, Replica

MOST_ATTEMPTS = 3  # per model of the fallback chain

log = logging.getLogger("sekisho")


async def serve(gateway: Gateway, cycle: HotCycle) -> None:
    """Carries one request from authentication to settled usage. A cancellation anywhere releases all that it holds."""
    now, limiter = gateway.snapshot, gateway.limiter  # one view to the end
    outcome = Outcome(cycle.operation, cycle.request_id, time.monotonic())
    lease: Lease | None = None
    try:
        if gateway.draining:
            raise ShuttingDown
        outcome.principal = principal = await gateway.identify(cycle, now)
        if limiter.shared is not None:
            await limiter.cover_request(principal.limits, outcome.started)
        lease = limiter.admit(principal.limits, outcome.started)
        call = await _read_call(cycle, outcome)
        outcome.asked, outcome.stream = call.model, call.stream
        outcome.model = model = resolve(call.model, principal, now.names)
        check_media(call.body, now.media_hosts)
        parsed = time.monotonic()
        if principal.limits.tokens:
            budget = _budget(call, model)
            if limiter.shared is not None:
                await limiter.cover_tokens(principal.limits, budget, parsed)
            lease.reserve(budget, parsed)
        if model.limits is not None:
            await _join_model(limiter, lease, call, model)
        cycle.extra_headers = lease.headers(parsed)
        await _forward(gateway, now, call, cycle, outcome, lease)
    except asyncio.CancelledError:
        _end(cycle, outcome, ClientGone() if cycle.disconnected else ShuttingDown())
    except GatewayError as error:
        if outcome.principal is not None and not cycle.extra_headers:
            cycle.extra_headers = limiter.headers(outcome.principal.limits, outcome.started)
        _end(cycle, outcome, error)
    except Exception:
        log.exception("request %s failed inside the gateway", cycle.request_id)
        _end(cycle, outcome, Internal())
    finally:
        outcome.ended = time.monotonic()
        if lease is not None:
            lease.settle(outcome.usage.total if outcome.usage else 0, outcome.ended)
            lease.close(outcome.ended)
        gateway.finished.append(outcome)


def _end(cycle: HotCycle, outcome: Outcome, error: GatewayError) -> None:
    outcome.error, outcome.status = error, error.status
    cycle.fail(error)


async def _read_call(cycle: HotCycle, outcome: Outcome) -> Call:
    if cycle.more_body or cycle.refused:
        begun = time.monotonic()
        raw = await cycle.read_body()
        outcome.waited_for_body = time.monotonic() - begun
    else:
        raw = cycle.take_body()
    parse: Callable[[Operation, bytes], Call] = parse_call
    if cycle.operation.takes_form:
        parse = partial(parse_form, content_type=cycle.headers.get(b"content-type"))
    if len(raw) > PARSE_IN_THREAD_ABOVE:
        return await asyncio.get_running_loop().run_in_executor(PARSER, parse, cycle.operation, raw)
    return parse(cycle.operation, raw)


def _budget(call: Call, model: Model) -> int:
    """Tokens to set aside: the prompt by estimate, and as many completion tokens as the request allows."""
    if not call.operation.generates:
        return call.prompt_tokens
    completion = model.max_tokens_default if call.max_tokens is None else call.max_tokens
    return call.prompt_tokens + completion * call.n


async def _join_model(limiter: Limiter, lease: Lease, call: Call, model: Model) -> None:
    """Takes the model's own share of a request into the lease. Raises: RateLimited, StoreUnavailable."""
    assert model.limits is not None
    now = time.monotonic()
    await limiter.cover_request(model.limits, now)
    own = limiter.admit(model.limits, now)
    lease.join(own)  # from here on it is given back with the rest
    budget = _budget(call, model)
    await limiter.cover_tokens(model.limits, budget, now)
    own.reserve(budget, now)


async def _forward(
    gateway: Gateway, now: Snapshot, call: Call, cycle: HotCycle, outcome: Outcome, lease: Lease
) -> None:
    """Tries replicas, then fallback models, until one has answered or the client has seen a part of an answer."""
    last: GatewayError | None = None
    for model in _chain(now, outcome):
        if model is not outcome.model:
            lease.part(time.monotonic())  # the model before has served nothing
            try:
                if model.limits is not None:
                    await _join_model(gateway.limiter, lease, call, model)
            except RateLimited as error:
                last = last or error
                continue
        tried: list[str] = []
        attempts = 0
        while attempts < MOST_ATTEMPTS:
            try:
                state = gateway.choose(model, call, tried)
            except NoReplica as error:
                last = last or _unfit_for_all(model, call) or error
                break
            tried.append(state.replica.id)
            if _unfit(state.replica, call) is not None:
                continue  # another one may be able to
            if not outcome.attempts:
                gateway.retries.asked()
            elif not gateway.retries.take():
                raise last or NoReplica("Too many requests are being repeated at the moment.", retry_after=5)
            attempts += 1
            outcome.attempts += 1
            attempt = Attempt(gateway, call, cycle, outcome, state)
            try:
                await attempt.run()
                return
            except (UpstreamError, EngineBusy) as error:
                attempt.blame(error)
                if attempt.shown or not error.retryable:
                    raise
                last = error
    last = last or NoReplica("No replica of this model is available at the moment.", retry_after=5)
    if last.status == 503 and outcome.model is not None and outcome.principal is not None:
        last.message += variant_note(outcome.model, outcome.principal, now.names)
    raise last


def _unfit(replica: Replica, call: Call) -> GatewayError | None:
    """Why this replica's engine could not honour the request."""
    backend = replica.backend
    unsupported = backend.refuse(call.operation, call.body)
    if unsupported is not None:
        message = f"'{unsupported.field}' cannot be used with this model: its engine is {backend.kind}, and"
        return UnsupportedOperation(f"{message} {unsupported.why}.", param=unsupported.field)
    if backend.cuts_prompts and replica.context_length is not None:
        return too_long(call, replica.context_length)
    return None


def _unfit_for_all(model: Model, call: Call) -> GatewayError | None:
    """The refusal, unless a replica that is away at the moment could serve the request."""
    able = [replica for replica in model.replicas if call.operation in replica.backend.paths]
    reasons = [_unfit(replica, call) for replica in able]
    return reasons[0] if reasons and None not in reasons else None


def _chain(now: Snapshot, outcome: Outcome) -> Iterator[Model]:
    """The model and its fallbacks in the operator's order. Permission is checked for every target."""
    model, principal = outcome.model, outcome.principal
    assert model is not None and principal is not None
    yield model
    for name in model.fallbacks:
        other = lookup(name, principal, now.names)
        if other is not None:
            yield other
