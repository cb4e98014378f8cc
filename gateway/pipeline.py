"""The whole path of a request, top to bottom: docs/architecture.md follows `serve` line by line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from backends.base import Operation
from gateway.attempt import PARSE_IN_THREAD_ABOVE, PARSER
from gateway.call import Call, parse_call
from gateway.catalog import resolve
from gateway.cycle import HotCycle
from gateway.errors import (
    ClientGone,
    GatewayError,
    Internal,
    ShuttingDown,
)
from gateway.formcall import parse_form
from gateway.forward import forward, join_model, token_budget
from gateway.limits import Lease
from gateway.media import check_media
from gateway.outcome import Outcome
from gateway.state import Gateway

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
        call.tenant, call.session_id = principal.tenant, cycle.headers.get(b"x-session-id", b"")
        outcome.asked, outcome.stream = call.model, call.stream
        outcome.model = model = resolve(call.model, principal, now.names)
        check_media(call.body, now.media_hosts)
        parsed = time.monotonic()
        if principal.limits.tokens:
            budget = token_budget(call, model)
            if limiter.shared is not None:
                await limiter.cover_tokens(principal.limits, budget, parsed)
            lease.reserve(budget, parsed)
        if model.limits is not None:
            await join_model(limiter, lease, call, model)
        cycle.extra_headers = lease.headers(parsed)
        await forward(gateway, now, call, cycle, outcome, lease)
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
