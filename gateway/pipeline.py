"""The whole path of a request, top to bottom: docs/architecture.md follows `serve` line by line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import ParamSpec, TypeVar

from backends.base import Operation
from gateway.attempt import PARSE_IN_THREAD_ABOVE, PARSER
from gateway.call import Call, parse_call
from gateway.catalog import resolve
from gateway.edge.cycle import HotCycle
from gateway.errors import (
    ClientGone,
    GatewayError,
    Internal,
    ShuttingDown,
)
from gateway.formcall import parse_form
from gateway.forward import forward, join_model, token_budget
from gateway.jsonplaces import Way
from gateway.limits import Lease
from gateway.media import Link, MediaRules, find_links, put_in
from gateway.media.fetching import Held, fetch_links
from gateway.outcome import Outcome
from gateway.state import Gateway
from gateway.tools.offers import admit
from gateway.types import ToolPolicy

P = ParamSpec("P")
T = TypeVar("T")
WITHHELD = b"x-sekisho-tools-withheld: %d\r\n"  # tools that were taken out of the request

log = logging.getLogger("sekisho")


async def serve(gateway: Gateway, cycle: HotCycle) -> None:
    """Carries one request from authentication to settled usage. A cancellation anywhere releases all that it holds."""
    now, limiter = gateway.snapshot, gateway.limiter  # one view to the end
    outcome = Outcome(cycle.operation, cycle.request_id, time.monotonic())
    if gateway.tracer is not None:
        outcome.trace = gateway.tracer.begin(cycle.headers)
    lease: Lease | None = None
    held: Held | None = None
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
        if gateway.content is not None:
            gateway.content.watch(cycle, call, outcome)
        outcome.model = model = resolve(call.model, principal, now.names)
        if principal.tenant.tools is not None:
            await _hold_against(principal.tenant.tools, call)
        if call.large:
            links = await _in_thread(find_links, call.body, call.raw, now.media)
        else:
            links = find_links(call.body, call.raw, now.media)
        parsed = time.monotonic()
        if principal.limits.tokens:
            budget = token_budget(call, model)
            if limiter.shared is not None:
                await limiter.cover_tokens(principal.limits, budget, parsed)
            lease.reserve(budget, parsed)
        if model.limits is not None:
            await join_model(limiter, lease, call, model)
        cycle.extra_headers = lease.headers(parsed)
        if call.withheld:
            cycle.extra_headers += WITHHELD % call.withheld
            outcome.tools_stripped = call.withheld
        if links and now.media.fetched:
            held = Held()
            await _fetch(links, call, now.media, outcome, held)
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
        if held is not None:
            held.let_go()
        gateway.finished.append(outcome)


async def _fetch(links: list[Link], call: Call, rules: MediaRules, outcome: Outcome, held: Held) -> None:
    """Puts what the request links to into it. Others' servers take their time, which is none of the gateway's own."""
    begun = time.monotonic()
    contents = await fetch_links(links, len(call.raw), rules, held=held)
    outcome.waited_for_body += time.monotonic() - begun
    await _in_thread(_put_in, call, contents)


def _put_in(call: Call, contents: Mapping[Way, str]) -> None:
    call.replace(*put_in(call.raw, call.body, contents))


def _in_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> asyncio.Future[T]:
    """For bodies above `PARSE_IN_THREAD_ABOVE`: what is done with all of one would hold up everybody else."""
    return asyncio.get_running_loop().run_in_executor(PARSER, partial(work, *args, **options))


def _end(cycle: HotCycle, outcome: Outcome, error: GatewayError) -> None:
    error.forget_frames()
    outcome.error, outcome.status, outcome.begun = error, error.status, cycle.started
    cycle.fail(error)


async def _read_call(cycle: HotCycle, outcome: Outcome) -> Call:
    if cycle.more_body or cycle.refused:
        begun = time.monotonic()
        await cycle.body_complete()
        outcome.waited_for_body = time.monotonic() - begun
    parse: Callable[[Operation, bytes], Call] = parse_call
    if cycle.operation.takes_form:
        parse = partial(parse_form, content_type=cycle.headers.get(b"content-type"))
    pieces = cycle.take_body()
    if sum(map(len, pieces)) > PARSE_IN_THREAD_ABOVE:
        return await _in_thread(_parse_pieces, parse, cycle.operation, pieces)
    return parse(cycle.operation, b"".join(pieces))  # a single piece is not copied


def _parse_pieces(parse: Callable[[Operation, bytes], Call], operation: Operation, pieces: list[bytes]) -> Call:
    raw = b"".join(pieces)  # others go on meanwhile
    pieces.clear()
    return parse(operation, raw)


async def _hold_against(policy: ToolPolicy, call: Call) -> None:
    """Raises: ToolNotAllowed, BadRequest."""
    if call.operation is not Operation.CHAT:
        return
    if call.large:
        await _in_thread(admit, call, policy)
    else:
        admit(call, policy)
