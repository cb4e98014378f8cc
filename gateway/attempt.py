"""One request to one replica: what is sent, how the answer is passed on, and who is to blame when it fails."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import orjson

from backends.failures import Failure, FailureKind
from gateway.answers import Answer, read_answer
from gateway.bigjson import LARGE
from gateway.call import Call
from gateway.dialect_tap import FixingTap
from gateway.edge.cycle import HotCycle
from gateway.errors import (
    GatewayError,
    UpstreamBroken,
    UpstreamError,
    from_failure,
)
from gateway.fit import looks_cut
from gateway.outcome import Outcome
from gateway.passthrough import Passing, is_whole, media_type, read_document
from gateway.replica_state import ReplicaState
from gateway.reply import Reply, Request
from gateway.sse import StreamTap
from gateway.state import Gateway
from gateway.tools.tap import Screening, tap_for
from gateway.tracing.context import passed_on
from gateway.tracing.trace import Leg
from gateway.types import Replica, Tenant, Usage

PARSE_IN_THREAD_ABOVE = LARGE  # bytes of a document whose parsing would hold up everybody else
# One thread: the parser keeps the interpreter to itself, and with several of them the event loop would wait for each.
PARSER = ThreadPoolExecutor(1, thread_name_prefix="parse")

ATTEMPTS = [b"x-sekisho-attempts: %d\r\n" % number for number in range(100)]
STRIPPED = b"x-sekisho-tools-stripped: %d\r\n"  # calls that were taken out of the answer

log = logging.getLogger("sekisho")


class Attempt:
    """One request to one replica. For a stream it is the sink between the engine's socket and the client's."""

    __slots__ = (
        "_cold", "_cycle", "_gateway", "_leg", "_outcome", "_reading", "_reply", "_trial", "call", "shown", "state",
        "tap",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, call: Call, cycle: HotCycle, outcome: Outcome, state: ReplicaState) -> None:
        self._gateway, self._cycle, self._outcome = gateway, cycle, outcome
        self.call, self.state = call, state
        self.tap: StreamTap | None = None
        self._reply: Reply | None = None
        self._trial = False  # it finds out whether the replica is back
        self._cold = 0  # characters of the prompt that its engine has to read, as far as known
        self._leg: Leg | None = None  # while tracing is on
        self.shown = False  # the client has seen an event of this answer: from here on there is no second try

    async def run(self, trial: bool | None = None) -> None:
        """`trial`: what `ReplicaState.begin` has returned, where a place was taken before.

        Raises: GatewayError; `shown` tells whether another replica may still be tried.
        """
        state, outcome, call, cycle = self.state, self._outcome, self.call, self._cycle
        replica = outcome.replica = state.replica
        cycle.keepalives = call.stream and not call.operation.passes
        reply: Reply | None = None
        if outcome.trace is not None:
            self._leg = outcome.trace.begin(call, replica)
        self._trial = state.begin() if trial is None else trial
        if call.prefix is not None:
            self._cold = self._gateway.note_sent(call, replica)
        self._reading = call.stream and not call.operation.passes
        if self._reading:
            state.begin_reading()
        outcome.sent = 0.0
        try:
            request = self._prepare(replica)
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
            state.end(self._trial)
            if self._reading:
                state.end_reading()
            if reply is not None:
                reply.close()
            if self._leg is not None:
                self._leg.end(outcome, reply.status if reply is not None else 0, self.tap, sys.exception())
        outcome.status = 200
        if replica.backend.cuts_prompts and outcome.usage is not None and looks_cut(call, outcome.usage):
            self._gateway.metrics.cut_prompts[replica.id,] += 1
            log.warning(
                "replica %s counted %d prompt tokens where about %d were sent: its context window may be too small",
                replica.id, outcome.usage.prompt, call.prompt_tokens,
            )  # fmt: skip
        self._measure()

    def _prepare(self, replica: Replica) -> Request:
        """The request's bytes; the client will be told who answers."""
        outcome, cycle = self._outcome, self._cycle
        assert outcome.principal is not None
        cycle.route_headers = route_headers(outcome, expose=self._gateway.snapshot.expose_route)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: attempt %d goes to %s", cycle.request_id, outcome.attempts, replica.id)
        return request_bytes(replica, self.call, cycle, outcome.principal.tenant, self._leg)

    def _measure(self) -> None:
        """What a good answer says of its replica."""
        outcome, usage = self._outcome, self._outcome.usage
        now = time.monotonic()
        first, tpot = outcome.first_token, None
        if first and usage is not None and usage.completion > 1:
            tpot = (now - first) / (usage.completion - 1)
        ttft = first - outcome.sent if first else None
        tokens = usage.completion if usage is not None else 1
        self.state.succeeded(now, outcome.sent, ttft, tpot, tokens, trial=self._trial, cold=self._cold)

    async def _answer(self, reply: Reply) -> None:
        body = reply.take_body() if reply.complete else await reply.read()
        outcome = self._outcome
        outcome.upstream_ended = time.monotonic()
        if len(body) > PARSE_IN_THREAD_ABOVE:
            answer: Answer = await asyncio.get_running_loop().run_in_executor(
                PARSER, read_answer, self.call, body, self.state.replica.backend, self._leg
            )
        else:
            answer = read_answer(self.call, body, self.state.replica.backend, self._leg)
        if answer.failure is not None:
            raise from_failure(answer.failure)
        outcome.usage = answer.usage or self._estimate(len(body) // 4 if self.call.operation.generates else 0)
        if answer.error is not None:
            raise answer.error
        if answer.stripped:
            outcome.tools_stripped = self.call.withheld + answer.stripped
        self._cycle.answer(200, answer.body, STRIPPED % answer.stripped if answer.stripped else b"")

    async def _relay(self, reply: Reply) -> None:
        call, backend = self.call, self.state.replica.backend
        if not reply.headers.get(b"content-type", b"").lower().startswith(backend.stream_type):
            raise await _not_a_stream(reply)
        cycle, outcome = self._cycle, self._outcome
        fixer = backend.stream_fixer(call.operation) if call.operation in backend.fixes else None
        strip, most = not call.wants_usage, self._gateway.snapshot.max_event
        if call.tools is not None:
            tap: StreamTap = tap_for(call.tools, backend, fixer, call.model, strip_usage=strip, max_event=most)
        elif fixer is None:
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
            if isinstance(tap, Screening):
                outcome.tools_stripped = call.withheld + tap.stripped
        if tap.failure is not None:
            raise tap.error()
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
                self._reading = False
                self.state.end_reading()
                if self._trial and tap.failure is None:
                    self._trial = False
                    self.state.end_trial(self._outcome.first_token)
        if tap.failure is not None and self._reply is not None:
            self._reply.fail(tap.error())  # not when the engine gets round to closing
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
        error.forget_frames()
        now = time.monotonic()
        kind = error.kind if isinstance(error, UpstreamError) else "busy"
        self._gateway.metrics.failures[self.state.replica.id, kind] += 1
        if error.counts_against_replica:
            self.state.failed(now, trial=self._trial)
        else:
            self.state.asked_to_wait(now, error.retry_after or 1)


def route_headers(outcome: Outcome, *, expose: bool) -> bytes:
    """Header lines that tell the client who has answered."""
    lines, replica, model = ATTEMPTS[min(outcome.attempts, len(ATTEMPTS) - 1)], outcome.replica, outcome.model
    if not expose or replica is None or model is None:
        return lines
    return lines + b"x-sekisho-replica: %b\r\nx-sekisho-policy: %b\r\n" % (replica.id.encode(), model.policy.encode())


def request_bytes(replica: Replica, call: Call, cycle: HotCycle, tenant: Tenant, leg: Leg | None = None) -> Request:
    """Head and body for an engine, in pieces where the body is large. Nothing of the client's head goes along but its
    trace context and request id. `leg`: while tracing is on, the span that the engine's own belong under.

    Who the tenant is, an engine learns from the gateway alone, and only as far as it keeps tenants apart.
    """
    backend = replica.backend
    more = b""
    for_engine = call.pieces_for_engine if call.large else call.for_engine
    if call.operation.takes_form:
        body = for_engine(replica.upstream_model, {})
        more = b"content-type: %b\r\n" % cycle.headers[b"content-type"]
    elif backend.translates:
        asked = backend.translate(call.operation, call.body, replica.context_length)
        body = orjson.dumps({"model": replica.upstream_model, **asked})
    else:
        salt = tenant.salt if call.operation in backend.salted else ""
        body = for_engine(replica.upstream_model, backend.edits(call.operation, call.body), salt)
    if leg is not None:
        more += leg.headers
    elif b"traceparent" in cycle.headers:
        more += passed_on(cycle.headers)
    if replica.embedded is not None:
        more += b"x-sekisho-tenant: %b\r\n" % tenant.name.encode()  # its queue is fair between tenants
    head = b"%bx-request-id: %b\r\n%b" % (replica.heads[call.operation], cycle.request_id.encode(), more)
    if isinstance(body, bytes):
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    return [b"%bcontent-length: %d\r\n\r\n" % (head, sum(map(len, body))), *body]


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
