"""OpenTelemetry: traces begin here, and spans of finished requests go to a collector, over OTLP and HTTP.

A request only decides ids (`traces`). When it is booked, what is known of it is put into a bounded queue, and a thread
of its own makes spans and sends them: a collector that is away, slow or wrong costs spans and nothing else. Nothing of
OpenTelemetry is imported before an endpoint is configured.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from random import getrandbits
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, Metric

from gateway.config import Config, StartupError, TracingConfig
from gateway.edge import HOT_ROUTES
from gateway.outcome import Outcome
from gateway.tracecontext import RANDOM, SAMPLED, read_parent, read_state
from gateway.traces import Finished, Trace

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

    from gateway.spans import Spans

MOST_WAITING = 8192  # requests whose spans wait to be sent; beyond it they are dropped and counted
MOST_AT_ONCE = 256  # requests in one message to the collector
ANSWERS_IN = 5.0  # seconds for one message, repetitions after a 429 or 503 included
STOPS_IN = 2.0  # seconds for what is left at the end
_BREATH = 0.00005  # seconds; long enough for a thread that waits for the interpreter to get it
_RATIO = 1 << 64  # sampling compares the last 64 bits of a trace id, as OpenTelemetry's own sampler does

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


class Tracer:
    """One process's traces. Exists always, and does something while `on`."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._settings = TracingConfig()
        self._bound = 0
        self._sender: Sender | None = None
        self.lost: dict[str, int] = {"queue_full": 0, "not_sent": 0}  # spans, by reason

    @property
    def on(self) -> bool:
        return self._sender is not None

    def adopt(self, config: Config) -> None:
        """Follows the configuration; what waits for a collector that is no longer named is still sent to it.

        Raises: StartupError where OpenTelemetry is missing; everything stays as it was then.
        """
        old, new = self._settings, config.tracing
        if new.model_copy(update={"sample": old.sample}) != old:
            scheme = "https" if config.server.tls is not None else "http"
            sender = Sender(new, self._version, scheme, self._count) if new.endpoint is not None else None
            if self._sender is not None:
                self._sender.retire()
            self._sender = sender
        self._settings, self._bound = new, round(new.sample * _RATIO)

    def followed(self, config: Config) -> Tracer | None:
        """As `adopt`, for a gateway that is running and cannot refuse any more. Itself, while it is on."""
        try:
            self.adopt(config)
        except StartupError as error:
            log.error("%s", error)
        return self if self.on else None

    def begin(self, headers: Mapping[bytes, bytes]) -> Trace:
        """A request's place in the trace that its head names, or in a new one. Whoever began a trace has decided
        whether it is recorded."""
        parent = read_parent(headers) if b"traceparent" in headers else None
        if parent is not None:
            return Trace(parent.trace_id, parent.span_id, parent.flags & (SAMPLED | RANDOM), read_state(headers))
        number = getrandbits(128) or 1
        return Trace(f"{number:032x}", "", SAMPLED if number % _RATIO < self._bound else 0, b"")

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Takes finished requests."""
        if self._sender is None:
            return
        found = [finished(outcome, outcome.trace) for outcome in outcomes if outcome.trace and outcome.trace.sampled]
        if found:
            self._sender.add(found)

    def gauges(self) -> Iterator[Metric]:
        if self.on:
            family = CounterMetricFamily("sekisho_spans_dropped", "Spans no collector has got", labels=("reason",))
            for reason, count in self.lost.items():
                family.add_metric((reason,), count)
            yield family

    def close(self) -> None:
        """Sends what is left, for at most two seconds."""
        if self._sender is not None:
            self._sender.close()

    def _count(self, reason: str, spans: int) -> None:
        self.lost[reason] += spans


def finished(outcome: Outcome, trace: Trace) -> Finished:
    principal, error = outcome.principal, outcome.error
    return Finished(
        trace=trace,
        operation=outcome.operation,
        request_id=outcome.request_id,
        status=outcome.status,
        begun=outcome.begun,
        code=(error.code or error.type) if error is not None else "",
        tenant=principal.tenant.name if principal is not None else None,
        key=principal.key if principal is not None else None,
        model=outcome.model.name if outcome.model is not None else None,
        replica=outcome.replica.id if outcome.replica is not None else None,
        stream=outcome.stream,
        attempts=outcome.attempts,
        queued=outcome.queued,
        usage_source=outcome.usage.source if outcome.usage is not None else None,
        started=outcome.started,
        first_token=outcome.first_token,
        ended=outcome.ended,
    )


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

        from gateway.spans import Spans
    except ImportError:
        raise StartupError(_MISSING) from None
    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, headers=headers, timeout=ANSWERS_IN)
    routes = {str(operation): path.decode() for path, operation in HOT_ROUTES.items()}
    return exporter, Spans(settings.service_name, version, scheme, routes)
