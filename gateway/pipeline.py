"""The whole path of a request, top to bottom: docs/architecture.md follows `serve` line by line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import getrandbits

import orjson

from backends.base import Operation
from backends.failures import Failure, FailureKind
from gateway.answers import Answer, read_answer
from gateway.auth import authenticate
from gateway.call import Call, parse_call
from gateway.catalog import find, may_use, resolve, variant_note
from gateway.cycle import HotCycle
from gateway.dialect_tap import FixingTap
from gateway.errors import (
    ClientGone,
    EngineBusy,
    GatewayError,
    Internal,
    NoReplica,
    ShuttingDown,
    UnsupportedOperation,
    UpstreamBroken,
    UpstreamError,
    from_failure,
)
from gateway.fit import looks_cut, too_long
from gateway.fleet import LoadTable, ReplicaState
from gateway.formcall import parse_form
from gateway.limits import Lease, Limiter
from gateway.logs import AccessLog
from gateway.media import check_media
from gateway.metrics import Metrics
from gateway.outcome import Outcome
from gateway.passthrough import Passing, is_whole, media_type, read_document
from gateway.routing import Ask, choose
from gateway.snapshot import Snapshot
from gateway.sse import StreamTap
from gateway.types import Model, Replica, Usage
from gateway.upstream import Reply, Upstream

MOST_ATTEMPTS = 3  # per model of the fallback chain
PARSE_IN_THREAD_ABOVE = 1024 * 1024  # bytes of a body whose parsing would hold up everybody else

log = logging.getLogger("sekisho")
# One thread: the parser keeps the interpreter to itself, and with several of them the event loop would wait for each.
_parser = ThreadPoolExecutor(1, thread_name_prefix="parse")


class Gateway:
    """The collaborators of `serve`. `snapshot` is replaced as a whole by a reload; everything else lives on."""

    def __init__(
        self,
        snapshot: Snapshot,
        metrics: Metrics,
        access_log: AccessLog,
        upstream: Upstream,
        limiter: Limiter | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.metrics, self.access_log, self.upstream = metrics, access_log, upstream
        self.limiter = limiter or Limiter()
        self.fleet = LoadTable()
        self.draining = False
        self.finished: list[Outcome] = []  # not booked yet
        self._turns: dict[str, int] = {}  # choices made, by model

    def choose(self, model: Model, call: Call, tried: Sequence[str]) -> ReplicaState:
        """Raises: NoReplica, UnsupportedOperation."""
        turn = self._turns[model.name] = self._turns.get(model.name, -1) + 1
        ask = Ask(call.operation, time.monotonic(), turn, getrandbits(30), tried)
        return choose(model, [self.fleet.of(replica) for replica in model.replicas], ask)

    def book(self) -> None:
        """Takes finished requests into the metrics and the access log. They are gathered and booked together, a few
        times a second and before anybody reads the metrics: together they cost a third of what each costs alone."""
        finished, self.finished = self.finished, []
        for outcome in finished:
            self.metrics.record(outcome)
        self.access_log.add(finished)


async def serve(gateway: Gateway, cycle: HotCycle) -> None:
    """Carries one request from authentication to settled usage. A cancellation anywhere releases all that it holds."""
    now = gateway.snapshot  # one view to the end
    outcome = Outcome(cycle.operation, cycle.request_id, time.monotonic())
    lease: Lease | None = None
    try:
        if gateway.draining:
            raise ShuttingDown
        outcome.principal = principal = authenticate(cycle.headers, now.keys, now.anonymous, time.time())
        lease = gateway.limiter.admit(principal.limits, outcome.started)
        call = await _read_call(cycle, outcome)
        outcome.asked, outcome.stream = call.model, call.stream
        outcome.model = model = resolve(call.model, principal, now.names)
        check_media(call.body, now.media_hosts)
        if principal.limits.tokens:
            lease.reserve(_budget(call, model), outcome.started)
        cycle.extra_headers = lease.headers(outcome.started)
        await _forward(gateway, now, call, cycle, outcome)
    except asyncio.CancelledError:
        _end(cycle, outcome, ClientGone() if cycle.disconnected else ShuttingDown())
    except GatewayError as error:
        if error.status == 503 and outcome.model is not None:
            error.message += variant_note(outcome.model, now.names)
        if outcome.principal is not None and not cycle.extra_headers:
            cycle.extra_headers = gateway.limiter.headers(outcome.principal.limits, outcome.started)
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
        return await asyncio.get_running_loop().run_in_executor(_parser, parse, cycle.operation, raw)
    return parse(cycle.operation, raw)


def _budget(call: Call, model: Model) -> int:
    """Tokens to set aside: the prompt by estimate, and as many completion tokens as the request allows."""
    if not call.operation.generates:
        return call.prompt_tokens
    completion = model.max_tokens_default if call.max_tokens is None else call.max_tokens
    return call.prompt_tokens + completion * call.n


async def _forward(gateway: Gateway, now: Snapshot, call: Call, cycle: HotCycle, outcome: Outcome) -> None:
    """Tries replicas, then fallback models, until one has answered or the client has seen a part of an answer."""
    last: GatewayError | None = None
    for model in _chain(now, outcome):
        tried: list[str] = []
        attempts = 0
        while attempts < MOST_ATTEMPTS:
            try:
                state = gateway.choose(model, call, tried)
            except NoReplica as error:
                last = last or _unfit_for_all(model, call) or error
                break
            replica = state.replica
            tried.append(replica.id)
            if replica.backend.refuse(call.operation, call.body) is not None or (
                replica.backend.cuts_prompts and _unfit(replica, call) is not None
            ):
                continue  # another one may be able to
            attempts += 1
            outcome.attempts += 1
            attempt = _Attempt(gateway, call, cycle, outcome, state)
            try:
                await attempt.run()
                return
            except (UpstreamError, EngineBusy) as error:
                attempt.blame(error)
                if attempt.shown or not error.retryable:
                    raise
                last = error
    raise last or NoReplica("No replica of this model is available at the moment.", retry_after=5)


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
        other = find(name, now.names)
        if other is not None and may_use(principal, other):
            yield other


class _Attempt:
    """One request to one replica. For a stream it is the sink between the engine's socket and the client's."""

    __slots__ = ("_cycle", "_gateway", "_outcome", "_reply", "call", "shown", "state", "tap")

    def __init__(self, gateway: Gateway, call: Call, cycle: HotCycle, outcome: Outcome, state: ReplicaState) -> None:
        self._gateway, self._cycle, self._outcome = gateway, cycle, outcome
        self.call, self.state = call, state
        self.tap: StreamTap | None = None
        self._reply: Reply | None = None
        self.shown = False  # the client has seen an event of this answer: from here on there is no second try

    async def run(self) -> None:
        """Raises: GatewayError; `shown` tells whether another replica may still be tried."""
        state, outcome, call, cycle = self.state, self._outcome, self.call, self._cycle
        replica = outcome.replica = state.replica
        request = request_bytes(replica, call, cycle, outcome.tenant_name)
        if self._gateway.snapshot.expose_route:
            cycle.route_headers = b"x-sekisho-replica: %b\r\nx-sekisho-policy: %b\r\n" % (
                replica.id.encode(), outcome.model.policy.encode() if outcome.model else b"",
            )  # fmt: skip
        cycle.keepalives = call.stream and not call.operation.passes
        reply: Reply | None = None
        trial = state.begin()
        outcome.sent = 0.0
        try:
            reply = await self._gateway.upstream.open(replica.endpoint, replica.timeouts, request, outcome)
            if reply.status != 200:
                raise await _refusal(replica, reply)
            if call.operation.passes:
                await self._pass(reply)
            elif call.stream:
                await self._relay(reply)
            else:
                await self._answer(reply)
        except asyncio.CancelledError:
            if outcome.sent and outcome.usage is None:
                outcome.usage = self._estimate(0)  # the engine has worked on the prompt
            raise
        finally:
            state.end(trial)
            if reply is not None:
                reply.close()
        outcome.status = 200
        if replica.backend.cuts_prompts and outcome.usage is not None and looks_cut(call, outcome.usage):
            self._gateway.metrics.cut_prompts[replica.id,] += 1
            log.warning(
                "replica %s counted %d prompt tokens where about %d were sent: its context window may be too small",
                replica.id, outcome.usage.prompt, call.prompt_tokens,
            )  # fmt: skip
        state.succeeded(outcome.first_token - outcome.sent if outcome.first_token else None)

    async def _answer(self, reply: Reply) -> None:
        body = reply.take_body() if reply.complete else await reply.read()
        outcome = self._outcome
        outcome.upstream_ended = time.monotonic()
        if len(body) > PARSE_IN_THREAD_ABOVE:
            answer: Answer = await asyncio.get_running_loop().run_in_executor(
                _parser, read_answer, self.call, body, self.state.replica.backend
            )
        else:
            answer = read_answer(self.call, body, self.state.replica.backend)
        if answer.failure is not None:
            raise from_failure(answer.failure)
        outcome.usage = answer.usage or self._estimate(len(body) // 4 if self.call.operation.generates else 0)
        self._cycle.answer(200, answer.body)

    async def _relay(self, reply: Reply) -> None:
        call, backend = self.call, self.state.replica.backend
        if not reply.headers.get(b"content-type", b"").lower().startswith(backend.stream_type):
            raise await _not_a_stream(reply)
        cycle, outcome = self._cycle, self._outcome
        fixer = backend.stream_fixer(call.operation) if call.operation in backend.fixes else None
        strip, most = not call.wants_usage, self._gateway.snapshot.max_event
        if fixer is None:
            tap = StreamTap(call.model, strip_usage=strip, max_event=most)
        else:
            tap = FixingTap(backend, fixer, call.model, strip_usage=strip, max_event=most)
        self.tap = tap
        self._reply = reply
        cycle.attach(reply.pause, reply.resume)
        try:
            if not cycle.started and not reply.has_body:
                cycle.begin()  # the status is known: nobody has to wait for the first token to see it
            await reply.relay(self)
        except UpstreamError:
            if not tap.complete:
                raise
            tap.cut()
            self.ended()  # every choice has come to its end: an engine may close as it likes
        finally:
            cycle.detach()
            if tap.events or tap.usage:
                outcome.usage = tap.usage or self._estimate(tap.tokens)
        if tap.failure is not None:
            raise from_failure(tap.failure)
        if not tap.complete:
            raise UpstreamBroken("The engine ended the stream before the answer was finished.")

    async def _pass(self, reply: Reply) -> None:
        """An answer that is anything but OpenAI's JSON. It counts as shown with its first byte."""
        call, cycle, outcome = self.call, self._cycle, self._outcome
        kind = media_type(reply)
        if is_whole(kind):
            body = await reply.read()
            outcome.upstream_ended = time.monotonic()
            if kind == "application/json":
                body, failure = read_document(body, call.model)
                if failure is not None:
                    raise from_failure(failure)
            outcome.usage = self._estimate(len(body) // 4)
            cycle.answer(200, body, content_type=reply.headers[b"content-type"])
            return
        sink = Passing(cycle, outcome, reply, kind)
        cycle.attach(reply.pause, reply.resume)
        try:
            await reply.relay(sink)
        except UpstreamError:
            self.shown = cycle.started
            sink.finish_event()
            raise
        finally:
            cycle.detach()
            if cycle.started:
                outcome.usage = self._estimate(sink.events)

    def _estimate(self, completion: int) -> Usage:
        """For answers that no engine has counted. Leaving early is not free: what was delivered is booked."""
        return Usage(self.call.prompt_tokens, completion, source="estimate")

    # --- Sink: called from the engine's socket
    def received(self, data: bytes) -> None:
        tap = self.tap
        assert tap is not None
        ready = tap.feed(data)
        if ready:
            self.shown = tap.events > 0  # comments may be followed by another engine's answer
            self._cycle.received(ready)
            if not self._outcome.first_token and tap.started:
                self._outcome.first_token = time.monotonic()
        if tap.failure is not None and self._reply is not None:
            self._reply.fail(from_failure(tap.failure))  # not when the engine gets round to closing
        elif tap.done and self._reply is not None:
            self._reply.linger()

    def ended(self) -> None:
        assert self.tap is not None
        self._outcome.upstream_ended = time.monotonic()
        rest = self.tap.end()
        if self.tap.complete:
            self.shown = True
            self._cycle.end(rest)
        elif rest:
            self.shown = True
            self._cycle.received(rest)

    def blame(self, error: GatewayError) -> None:
        """Books a failed attempt against its replica, unless the replica is not to blame."""
        now = time.monotonic()
        kind = error.kind if isinstance(error, UpstreamError) else "busy"
        self._gateway.metrics.failures[self.state.replica.id, kind] += 1
        if error.counts_against_replica:
            self.state.failed(now)
        else:
            self.state.asked_to_wait(now, error.retry_after or 1)


def request_bytes(replica: Replica, call: Call, cycle: HotCycle, tenant: str) -> bytes:
    """Head and body for an engine. Nothing of the client's head goes along but its trace context and request id."""
    backend = replica.backend
    more = b""
    if call.operation.takes_form:
        body = call.for_engine(replica.upstream_model, {})
        more = b"content-type: %b\r\n" % cycle.headers[b"content-type"]
    elif backend.translates:
        asked = backend.translate(call.operation, call.body, replica.context_length)
        body = orjson.dumps({"model": replica.upstream_model, **asked})
    else:
        body = call.for_engine(replica.upstream_model, backend.edits(call.operation, call.body))
    for name in (b"traceparent", b"tracestate"):
        if name in cycle.headers:
            more += b"%b: %b\r\n" % (name, cycle.headers[name])
    if replica.embedded is not None:
        more += b"x-sekisho-tenant: %b\r\n" % tenant.encode()  # its queue is fair between tenants
    return b"%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
        replica.heads[call.operation], cycle.request_id.encode(), more, len(body), body,
    )  # fmt: skip


async def _refusal(replica: Replica, reply: Reply) -> GatewayError:
    """The engine answered with something other than 200."""
    body = await reply.read()
    failure = replica.backend.read_failure(reply.status, body)
    return from_failure(failure, _seconds(reply.headers.get(b"retry-after")))


async def _not_a_stream(reply: Reply) -> GatewayError:
    """A 200 that is no stream: an error in disguise, or an engine that does not stream."""
    answer = (await reply.read())[:4096]
    if b'"error"' in answer:
        return from_failure(Failure(FailureKind.BROKEN, "It answered a request for a stream with an error document."))
    return UpstreamBroken("The engine answered a request for a stream with a whole document.")


def _seconds(retry_after: bytes | None) -> float | None:
    """Retry-After in its usual form; a date is rare and not worth a guess."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdigit() else None
