"""Spans of finished requests on their way to a collector: a bounded queue, and a thread that makes and sends them.

A collector that is away, slow or wrong costs spans and nothing else.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from gateway.config import StartupError, TracingConfig
from gateway.edge.routes import HOT_ROUTES
from gateway.tracing.trace import Finished

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

    from gateway.tracing.spans import Spans

MOST_WAITING = 8192  # requests whose spans wait to be sent; beyond it they are dropped and counted
MOST_AT_ONCE = 256  # requests in one message to the collector
ANSWERS_IN = 5.0  # seconds for one message, repetitions after a 429 or 503 included
STOPS_IN = 2.0  # seconds for what is left at the end
_BREATH = 0.00005  # seconds; long enough for a thread that waits for the interpreter to get it

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_MISSING = "`tracing.endpoint` needs OpenTelemetry: install sekisho[otel]"

log = logging.getLogger("sekisho")


def require(settings: TracingConfig) -> None:
    """Raises: StartupError where OpenTelemetry would be needed and is missing. It is looked for, not imported."""
    try:
        found = settings.endpoint is None or find_spec(_EXPORTER) is not None
    except ImportError:
        found = False
    if not found:
        raise StartupError(_MISSING)


class Sender:
    """A queue and the thread that empties it."""

    def __init__(self, settings: TracingConfig, version: str, scheme: str, count: Callable[[str, int], None]) -> None:
        """Raises: StartupError. `count` is told of spans that are lost, and why."""
        self._exporter, self._spans = _parts(settings, version, scheme)
        self._count = count
        self._queue: SimpleQueue[list[Finished] | None] = SimpleQueue()
        self._taken = self._sent = 0  # requests; each is changed by one thread only
        self._failing = False
        self._stopping = threading.Event()
        self._complaints = _Complaints()
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def add(self, requests: list[Finished]) -> None:
        if self._taken - self._sent > MOST_WAITING:
            self._count("queue_full", _spans_of(requests))
            return
        self._taken += len(requests)
        self._queue.put(requests)

    def retire(self) -> None:
        """The thread ends when it has sent what it has."""
        self._queue.put(None)

    def close(self) -> None:
        self.retire()
        self._thread.join(STOPS_IN)
        self._stopping.set()  # whatever is on its way will find nobody who waits for it

    # --- the thread
    def _work(self) -> None:
        last = False
        while not last and (requests := self._queue.get()) is not None:
            last = self._fill(requests)
            for start in range(0, len(requests), MOST_AT_ONCE):
                if self._stopping.is_set():
                    return
                self._send(requests[start : start + MOST_AT_ONCE])
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _fill(self, requests: list[Finished]) -> bool:
        """Takes what else waits, as far as it fits into one message. Whether the end was among it."""
        while len(requests) < MOST_AT_ONCE:
            try:
                more = self._queue.get_nowait()
            except Empty:
                return False
            if more is None:
                return True
            requests += more
        return False

    def _send(self, requests: list[Finished]) -> None:
        offset = time.time() - time.monotonic()
        batch: Any = _Batch(requests, self._spans, offset)
        with self._complaints:
            succeeded = self._exporter.export(batch).value == 0
        self._sent += len(requests)
        if succeeded:
            if self._failing:
                log.info("the trace collector takes spans again")
        else:
            self._count("not_sent", len(batch))
            if not self._failing:
                log.error("spans are lost, since %s; see `tracing.endpoint`", self._complaints.text())
        self._failing = not succeeded


class _Batch:
    """Spans that are made while the exporter goes through them, one after the other.

    Between two requests the interpreter is let go: made and encoded in one go, a batch would hold up the event loop
    for the whole of it.
    """

    def __init__(self, requests: Sequence[Finished], spans: Spans, offset: float) -> None:
        self._requests, self._spans, self._offset = requests, spans, offset

    def __len__(self) -> int:
        return _spans_of(self._requests)

    def __iter__(self) -> Iterator[ReadableSpan]:
        for request in self._requests:
            yield from self._spans.of(request, self._offset)
            time.sleep(_BREATH)


def _spans_of(requests: Sequence[Finished]) -> int:
    return sum(1 + len(request.trace.legs) for request in requests)


class _Complaints(logging.Handler):
    """Hears what the exporter has to say, which would be a line for every message, with the collector's address."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._status = ""
        self._speakers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3")]
        for speaker in self._speakers:
            speaker.propagate = False

    def __enter__(self) -> None:
        self._status = ""
        for speaker in self._speakers:
            speaker.addHandler(self)

    def __exit__(self, *_: object) -> None:
        for speaker in self._speakers:
            speaker.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"\bcode: (\d{3})\b", record.getMessage())
        self._status = found[1] if found else self._status

    def text(self) -> str:
        if self._status:
            return f"the trace collector answers {self._status}"
        return "the trace collector cannot be reached, or does not take them in time"


def _parts(settings: TracingConfig, version: str, scheme: str) -> tuple[OTLPSpanExporter, Spans]:
    """Raises: StartupError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from gateway.tracing.spans import Spans
    except ImportError:
        raise StartupError(_MISSING) from None
    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, headers=headers, timeout=ANSWERS_IN)
    routes = {str(operation): path.decode() for path, operation in HOT_ROUTES.items()}
    return exporter, Spans(settings.service_name, version, scheme, routes)
