"""An OpenTelemetry collector on a real socket: OTLP over HTTP, parsed, with the ways in which one may fail.

    with Collector() as collector:
        collector.script = lambda x: x.answer(503)      # for every message; `once` for the next one only
        collector.spans()                               # whatever has come and was answered with 200
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

PATIENCE = 60.0  # seconds after which a message that is held is let go
Script = Callable[["Message"], None]


class Message:
    """One message of spans, to be answered."""

    def __init__(self, collector: Collector, handler: BaseHTTPRequestHandler) -> None:
        self._handler, self._collector = handler, collector
        self.path, self.headers = handler.path, {name.lower(): value for name, value in handler.headers.items()}
        self.body = handler.rfile.read(int(self.headers["content-length"]))

    def answer(self, status: int = 200) -> None:
        self._handler.send_response(status)
        self._handler.send_header("content-length", "0")
        self._handler.end_headers()

    def hang(self) -> None:
        """Nothing, until the collector stops."""
        self._collector.stopping.wait(PATIENCE)
        self._handler.close_connection = True


class Traced:
    """One span as it came."""

    def __init__(self, span: Span, resource: dict[str, Any]) -> None:
        self.name, self.resource, self.state = span.name, resource, span.trace_state
        self.trace_id, self.span_id, self.parent_id = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.kind = Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
        self.status = Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_")
        self.begun, self.ended = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = {entry.key: plain(entry.value) for entry in span.attributes}
        self.events = [event.name for event in span.events]


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(entry) for entry in value.array_value.values]
    return getattr(value, kind) if kind else None


class Collector:
    def __init__(self) -> None:
        self.script: Script = Message.answer
        self.messages: list[Message] = []  # whatever was answered
        self.seen = 0  # messages, answered or not
        self.stopping = threading.Event()
        self._once: deque[Script] = deque()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                collector.take(Message(collector, self))

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def once(self, *scripts: Script) -> None:
        self._once.extend(scripts)

    def take(self, message: Message) -> None:
        self.seen += 1
        script = self._once.popleft() if self._once else self.script
        accepted = script is Message.answer
        if accepted:
            self.messages.append(message)
        script(message)

    def spans(self) -> list[Traced]:
        found = []
        for message in list(self.messages):
            request = ExportTraceServiceRequest.FromString(message.body)
            for entry in request.resource_spans:
                resource = {attribute.key: plain(attribute.value) for attribute in entry.resource.attributes}
                found += [Traced(span, resource) for scope in entry.scope_spans for span in scope.spans]
        return found

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
