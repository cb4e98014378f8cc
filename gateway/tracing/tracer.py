"""Where traces begin, and where finished requests go while tracing is on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from random import getrandbits

from prometheus_client.core import CounterMetricFamily, Metric

from gateway.config import Config, StartupError, TracingConfig
from gateway.outcome import Outcome
from gateway.tracing.context import RANDOM, SAMPLED, read_parent, read_state
from gateway.tracing.sender import Sender
from gateway.tracing.trace import Finished, Trace

_RATIO = 1 << 64  # sampling compares the last 64 bits of a trace id, as OpenTelemetry's own sampler does

log = logging.getLogger("sekisho")


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
            sender = None
            if new.endpoint is not None:
                sender = Sender(new, self._version, config.server.scheme, self._count)
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
        return Trace(f"{number:032x}", "", SAMPLED if self._chosen(number) else 0, b"")

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Takes finished requests."""
        if self._sender is None:
            return
        found = [finished(outcome, outcome.trace) for outcome in outcomes if outcome.trace and self._is_kept(outcome)]
        if found:
            self._sender.add(found)

    def _is_kept(self, outcome: Outcome) -> bool:
        """Strangers do not decide what is recorded: a flood of them would crowd out everybody else's spans."""
        trace = outcome.trace
        if trace is None or not trace.sampled:
            return False
        return outcome.principal is not None or self._chosen(int(trace.trace_id, 16))

    def _chosen(self, number: int) -> bool:
        return number % _RATIO < self._bound

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
