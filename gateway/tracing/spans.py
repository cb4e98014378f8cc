"""A finished request as OpenTelemetry spans: a server span, and a client span for each attempt at an engine.

Names are those of the OpenTelemetry conventions for HTTP (https://opentelemetry.io/docs/specs/semconv/http/http-spans/)
and generative AI (https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/client-inference.md); what
they have no word for begins with `sekisho.`. Tokens stand on client spans alone, or whoever adds them up would count
them twice. Addresses of engines are left out, and so is all that callers and models have written.

Imported only where tracing is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from gateway.outcome import ABORTED
from gateway.tracing.trace import Finished, Leg, Trace

OPERATIONS = {"completions": "text_completion"}  # where the conventions have another word for an operation
PARAMETERS = {  # member of a request -> (attribute, type)
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", int),
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "max_completion_tokens": ("gen_ai.request.max_tokens", int),
    "seed": ("gen_ai.request.seed", int),
    "presence_penalty": ("gen_ai.request.presence_penalty", float),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
    "reasoning_effort": ("gen_ai.request.reasoning.level", str),
    "dimensions": ("gen_ai.embeddings.dimension.count", int),
}
_LARGEST = 1 << 63  # what fits into OTLP's integers
_ERROR, _UNSET = StatusCode.ERROR, Status(StatusCode.UNSET)

Attributes = dict[str, Any]


class Spans:
    """Makes the spans of one process."""

    def __init__(self, service_name: str, version: str, scheme: str, routes: Mapping[str, str]) -> None:
        """Args: scheme: of the gateway's own port, http or https. routes: operation -> path."""
        named = {"service.name": service_name, "service.version": version, "service.instance.id": str(uuid4())}
        self._resource = Resource.create(named)
        self._scope = InstrumentationScope("sekisho", version)
        self._scheme, self._routes = scheme, routes

    def of(self, request: Finished, offset: float) -> Iterator[ReadableSpan]:
        """The server span first. `offset`: seconds from the steady clock to Unix time."""
        trace = request.trace
        context = _context(trace, trace.span_id)
        parent = _context(trace, trace.parent_id, remote=True) if trace.parent_id else None
        route = self._routes[request.operation]
        yield ReadableSpan(
            f"POST {route}", context, parent, self._resource, server_attributes(request, route, self._scheme),
            kind=SpanKind.SERVER, status=_server_status(request), instrumentation_scope=self._scope,
            start_time=_nanoseconds(request.started, offset), end_time=_nanoseconds(request.ended, offset),
        )  # fmt: skip
        for number, leg in enumerate(trace.legs):
            attributes = client_attributes(request, leg, number)
            yield ReadableSpan(
                f"{attributes['gen_ai.operation.name']} {leg.replica.upstream_model}", _context(trace, leg.span_id),
                context, self._resource, attributes, _events(leg, offset),
                kind=SpanKind.CLIENT, status=Status(_ERROR) if leg.code else _UNSET, instrumentation_scope=self._scope,
                start_time=_nanoseconds(leg.started, offset),
                end_time=_nanoseconds(leg.ended or request.ended, offset),
            )  # fmt: skip


def server_attributes(request: Finished, route: str, scheme: str) -> Attributes:
    found: Attributes = {
        "http.request.method": "POST",
        "http.route": route,
        "url.path": route,
        "url.scheme": scheme,
        "http.response.status_code": _sent_status(request),
        "gen_ai.operation.name": OPERATIONS.get(request.operation, request.operation),
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": True if request.stream else None,
        "error.type": request.code if _server_failed(request) else None,
        "sekisho.request_id": request.request_id,
        "sekisho.status": request.status,
        "sekisho.error": request.code or None,
        "sekisho.tenant": request.tenant,
        "sekisho.key": request.key,
        "sekisho.replica": request.replica,
        "sekisho.attempts": request.attempts,
        "sekisho.usage_source": request.usage_source,
        "sekisho.queue_wait": request.queued or None,
        "sekisho.time_to_first_token": request.first_token - request.started if request.first_token else None,
    }
    return _known(found)


def client_attributes(request: Finished, leg: Leg, number: int) -> Attributes:
    """`number`: 0 for the first attempt."""
    usage, said = leg.usage, leg.said
    found: Attributes = {
        "gen_ai.operation.name": OPERATIONS.get(request.operation, request.operation),
        "gen_ai.provider.name": leg.replica.backend.kind,
        "gen_ai.request.model": leg.replica.upstream_model,
        "gen_ai.request.stream": True if request.stream else None,
        "gen_ai.response.id": said.id,
        "gen_ai.response.model": said.model,
        "gen_ai.response.finish_reasons": list(said.finish_reasons) or None,
        "gen_ai.response.time_to_first_chunk": leg.first_token - leg.sent if leg.first_token and leg.sent else None,
        "http.request.method": "POST",
        "http.request.resend_count": number or None,
        "http.response.status_code": leg.status or None,
        "error.type": leg.code or None,
        "sekisho.replica": leg.replica.id,
        "sekisho.cancelled": True if leg.cancelled else None,
    }
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt
        found["gen_ai.usage.output_tokens"] = usage.completion
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached or None
        found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning or None
    return _known(found | _parameters(request.trace.parameters))


def _parameters(given: Mapping[str, Any]) -> Attributes:
    found: Attributes = {}
    for name, (attribute, kind) in PARAMETERS.items():
        value = given.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is kind:
            found[attribute] = value
    if given.get("n") not in (None, 1) and type(given["n"]) is int:
        found["gen_ai.request.choice.count"] = given["n"]
    if isinstance(given.get("encoding_format"), str):
        found["gen_ai.request.encoding_formats"] = [given["encoding_format"]]
    return found


def _known(found: Attributes) -> Attributes:
    """Without what is not known, and without numbers that OTLP cannot carry: one of them would lose the whole batch."""
    return {
        name: value
        for name, value in found.items()
        if value is not None and not (type(value) is int and not -_LARGEST <= value < _LARGEST)
    }


def _sent_status(request: Finished) -> int | None:
    """What the client has seen: nothing, where it left before the answer began."""
    if request.begun:
        return 200
    return None if request.status == ABORTED else request.status


def _server_failed(request: Finished) -> bool:
    """A caller's mistake is no failure of the server; an answer that nobody received in full is one."""
    return request.status >= 500 or request.status == ABORTED


def _server_status(request: Finished) -> Status:
    return Status(_ERROR) if _server_failed(request) else _UNSET


def _events(leg: Leg, offset: float) -> list[Event]:
    if not leg.first_token:
        return []
    return [Event("sekisho.first_token", timestamp=_nanoseconds(leg.first_token, offset))]


def _context(trace: Trace, span_id: str, *, remote: bool = False) -> SpanContext:
    state = TraceState.from_header([trace.state.decode("latin-1")]) if trace.state else None
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, TraceFlags(trace.flags), state)


def _nanoseconds(moment: float, offset: float) -> int:
    return int((moment + offset) * 1e9)
