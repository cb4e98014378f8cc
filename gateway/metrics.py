"""Every Prometheus metric, declared once and counted in plain integers.

prometheus_client renders the page; counting through its objects (a lock and a label look-up each) would cost a third
of the gateway's whole budget per request, so `record` adds to lists and the page is built when somebody asks for it.
Labels are bounded: tenants, models and replicas come from the configuration, codes from this program.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Exemplar

from gateway.outcome import Outcome

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OPENMETRICS = "application/openmetrics-text"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_OVERHEAD = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_REJECTIONS = {401, 403, 404, 413, 429, 503}


class Histogram:
    """Counts per bucket and their sum; where traces are recorded, for each bucket the latest of them."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0
        self.exemplars: dict[int, tuple[str, float, float]] | None = None  # bucket -> trace id, value, Unix time

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def remember(self, value: float, trace_id: str) -> None:
        """`value` has been observed in a request whose trace is recorded."""
        if self.exemplars is None:
            self.exemplars = {}
        self.exemplars[bisect_left(self.bounds, value)] = trace_id, value, time.time()

    def buckets(self) -> list[Any]:
        """Cumulative, as the exposition format wants them: (bound, count), or (bound, count, exemplar)."""
        reached, rows, known = 0, list[Any](), self.exemplars or {}
        for bucket, (bound, count) in enumerate(
            zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True)
        ):  # fmt: skip
            reached += count
            if bucket in known:
                trace_id, value, moment = known[bucket]
                rows.append((bound, float(reached), Exemplar({"trace_id": trace_id}, value, round(moment, 3))))
            else:
                rows.append((bound, float(reached)))
        return rows


class _Timings:
    """Histograms of one model and operation."""

    __slots__ = ("duration", "first_token", "per_token", "queue_wait")

    def __init__(self) -> None:
        self.duration, self.first_token = Histogram(_SECONDS), Histogram(_SECONDS)
        self.per_token, self.queue_wait = Histogram(_TOKEN_SECONDS), Histogram(_SECONDS)


class _Spending:
    """Counters of one tenant, model and operation."""

    __slots__ = ("answers", "cached", "completion", "prompt", "timings")

    def __init__(self, timings: _Timings) -> None:
        self.timings = timings
        self.answers: dict[tuple[int, str], int] = defaultdict(int)  # (status, code) -> requests
        self.prompt = self.cached = self.completion = 0


Gauges = Callable[[], Iterable[Metric]]


class Metrics:
    """The counters of one process."""

    def __init__(self, version: str) -> None:
        self._spending: dict[tuple[str, str, str], _Spending] = {}
        self._timings: dict[tuple[str, str], _Timings] = {}
        self._overhead = {"request": Histogram(_OVERHEAD), "response": Histogram(_OVERHEAD)}
        self.rejected: dict[tuple[str, str], int] = defaultdict(int)
        self.failures: dict[tuple[str, str], int] = defaultdict(int)
        self.cut_prompts: dict[tuple[str], int] = defaultdict(int)
        self.reloads = {"success": 0, "failure": 0}
        self.retries = 0
        self._version = version
        self._gauges: list[Gauges] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self.families))
        ProcessCollector(registry=self._registry)

    def add_gauges(self, read: Gauges) -> None:
        """Gauges are read from whoever owns the state, when the page is asked for."""
        self._gauges.append(read)

    def collect(self) -> list[Metric]:
        """Everything there is to say at this moment."""
        return list(self._registry.collect())

    def page(self) -> bytes:
        return page(self.collect())[0]

    def record(self, outcome: Outcome) -> None:
        """Once per request, at its end."""
        key = (outcome.tenant_name, outcome.model_name, outcome.operation)
        spending = self._spending.get(key)
        if spending is None:
            spending = self._spending[key] = _Spending(self._timings.setdefault(key[1:], _Timings()))
        error = outcome.error
        spending.answers[outcome.status, (error.code or error.type) if error else ""] += 1
        usage = outcome.usage
        if usage is not None:
            spending.prompt += usage.prompt
            spending.completion += usage.completion
            spending.cached += usage.cached
        if error is not None and outcome.status in _REJECTIONS and not outcome.attempts:
            self.rejected[key[0], error.code or error.type] += 1
        if outcome.attempts > 1:
            self.retries += outcome.attempts - 1
        if outcome.queued:
            spending.timings.queue_wait.observe(outcome.queued)
        if outcome.sent:
            self._time(outcome, spending.timings)

    def _time(self, outcome: Outcome, timings: _Timings) -> None:
        trace = outcome.trace
        trace_id = trace.trace_id if trace is not None and trace.sampled else None
        duration = outcome.ended - outcome.started
        timings.duration.observe(duration)
        if trace_id is not None:
            timings.duration.remember(duration, trace_id)
        if outcome.attempts == 1:  # a retry's waiting is the failed engine's, not the gateway's
            self._overhead["request"].observe(
                outcome.sent - outcome.started - outcome.waited_for_body - outcome.queued
            )
        if outcome.upstream_ended:
            self._overhead["response"].observe(outcome.ended - outcome.upstream_ended)
        if not outcome.first_token:
            return
        waited = outcome.first_token - outcome.started
        timings.first_token.observe(waited)
        if trace_id is not None:
            timings.first_token.remember(waited, trace_id)
        usage = outcome.usage
        if usage is not None and usage.completion > 1 and outcome.upstream_ended:
            each = (outcome.upstream_ended - outcome.first_token) / (usage.completion - 1)
            timings.per_token.observe(each)
            if trace_id is not None:
                timings.per_token.remember(each, trace_id)

    def families(self) -> Iterator[Metric]:
        yield self._requests()
        yield self._tokens()
        yield from self._histograms()
        yield counter("rejected", "Requests refused before an engine was asked", ("tenant", "reason"), self.rejected)
        yield counter("upstream_failures", "Attempts that failed at an engine", ("replica", "kind"), self.failures)
        yield counter(
            "suspected_prompt_cuts", "Answers to less than half of the prompt", ("replica",), self.cut_prompts
        )
        yield counter("retries", "Attempts beyond the first", (), {(): self.retries})
        reloads = {(result,): count for result, count in self.reloads.items()}
        yield counter("config_reloads", "Attempts to load a changed configuration", ("result",), reloads)
        yield gauge("build_info", "Always 1; the labels say what runs", ("version",), {(self._version,): 1.0})
        for read in self._gauges:
            yield from read()

    def _requests(self) -> Metric:
        rows = {
            (*key, str(status), code): count
            for key, spending in self._spending.items()
            for (status, code), count in spending.answers.items()
        }
        return counter("requests", "Finished requests", ("tenant", "model", "operation", "status", "code"), rows)

    def _tokens(self) -> Metric:
        rows: dict[tuple[str, ...], int] = defaultdict(int)
        for (tenant, model, _), spending in self._spending.items():
            rows[tenant, model, "prompt"] += spending.prompt
            rows[tenant, model, "completion"] += spending.completion
            if spending.cached:
                rows[tenant, model, "cached"] += spending.cached
        return counter("tokens", "Tokens booked; cached ones are part of prompt", ("tenant", "model", "kind"), rows)

    def _histograms(self) -> Iterator[Metric]:
        for name, attribute, text in (
            ("request_duration_seconds", "duration", "From the request's head to the last byte of the answer"),
            ("time_to_first_token_seconds", "first_token", "TTFT: until the first text, reasoning or tool call"),
            ("time_per_output_token_seconds", "per_token", "TPOT: mean time between tokens after the first"),
            ("queue_wait_seconds", "queue_wait", "Time spent waiting for a free replica, by requests that had to wait"),
        ):
            family = HistogramMetricFamily(f"sekisho_{name}", text, labels=("model", "operation"))
            for key, timings in self._timings.items():
                histogram: Histogram = getattr(timings, attribute)
                family.add_metric(key, histogram.buckets(), sum_value=histogram.total)
            yield family
        family = HistogramMetricFamily("sekisho_overhead_seconds", "What the gateway itself added", labels=("phase",))
        for phase, histogram in self._overhead.items():
            family.add_metric((phase,), histogram.buckets(), sum_value=histogram.total)
        yield family


def page(families: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """Families as text, of this process or of several together (`merged`), and its content type: OpenMetrics, which
    has exemplars, for whoever accepts it, else Prometheus' own format. `accept`: the header of that name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(lambda: iter(families)))
    if _accepts_openmetrics(accept):
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE


def _accepts_openmetrics(accept: str) -> bool:
    for entry in accept.lower().split(","):
        kind, *parameters = [part.strip() for part in entry.split(";")]
        if kind == OPENMETRICS and not any(re.fullmatch(r"q=0(?:\.0*)?", one) for one in parameters):
            return True
    return False


class _Collector:
    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


def counter(name: str, text: str, labels: tuple[str, ...], rows: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"sekisho_{name}", text, labels=labels)
    for values, count in rows.items():
        family.add_metric(values, count)
    return family


def gauge(name: str, text: str, labels: tuple[str, ...], rows: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"sekisho_{name}", text, labels=labels)
    for values, value in rows.items():
        family.add_metric(values, value)
    return family
