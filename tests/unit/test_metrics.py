"""The metrics page: names and labels users depend on, true numbers, and a bounded number of series."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from backends.base import EngineLoad, OpenAICompatible
from gateway.errors import AuthError, BadRequest, GatewayError, ModelNotFound, NoReplica, RateLimited, UpstreamTimeout
from gateway.fleet import LoadTable
from gateway.metrics import Histogram, Metrics
from gateway.outcome import Outcome
from gateway.types import Endpoint, Limits, Model, Principal, Replica, Tenant, Timeouts, Usage

REPLICA = Replica("m/vllm-1", "m", OpenAICompatible(kind="vllm"), Endpoint("h", 80), "", "m", Timeouts(), {})
MODEL = Model("m", (), "least_load", (), (), (REPLICA,), 512, 0)
CALLER = Principal(Tenant("research"), "ci", "user", ("*",), None, Limits())
HISTOGRAMS = [
    "request_duration_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds", "queue_wait_seconds",
]  # fmt: skip
Page = dict[str, dict[frozenset[tuple[str, str]], float]]


def finished(**more: object) -> Outcome:
    """A request of one second: 10 ms of ours, a first token after 0.21 s, 50 ms until everything was passed on."""
    outcome = Outcome("chat", "req_1", 100.0)
    outcome.principal, outcome.model, outcome.replica, outcome.asked = CALLER, MODEL, REPLICA, "alias"
    outcome.status, outcome.attempts, outcome.usage = 200, 1, Usage(10, 11, 4)
    outcome.sent, outcome.first_token, outcome.upstream_ended, outcome.ended = 100.01, 100.21, 101.21, 101.26
    for name, value in more.items():
        setattr(outcome, name, value)
    return outcome


def failed(error: GatewayError, **more: object) -> Outcome:
    return finished(error=error, status=error.status, usage=None, **more)


def refused(error: GatewayError, **more: object) -> Outcome:
    return failed(error, **{"attempts": 0, "sent": 0.0, "first_token": 0.0, "upstream_ended": 0.0} | more)


def page(*outcomes: Outcome, metrics: Metrics | None = None) -> Page:
    metrics = metrics or Metrics("1.2.3")
    for outcome in outcomes:
        metrics.record(outcome)
    found: Page = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def labels(found: Page, name: str) -> set[frozenset[str]]:
    return {frozenset(key for key, _ in row) for row in found[name]}


def value(found: Page, name: str, **wanted: str) -> float:
    return found[f"sekisho_{name}"][frozenset(wanted.items())]


def whole_page() -> Page:
    metrics, fleet = Metrics("1.2.3"), LoadTable()
    fleet.adopt([REPLICA])
    fleet.of(REPLICA).load = EngineLoad(1, 2, 0.5)
    metrics.add_gauges(lambda: fleet.gauges(0.0))
    metrics.failures["m/vllm-1", "timeout"] += 1
    return page(finished(), refused(RateLimited("x")), metrics=metrics)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("requests_total", "tenant model operation status code"),
        ("tokens_total", "tenant model kind"),
        *((f"{name}_count", "model operation") for name in HISTOGRAMS),
        ("overhead_seconds_count", "phase"),
        ("inflight_requests", "model replica"),
        ("replica_up", "model replica backend format"),
        ("replica_running", "model replica"),
        ("replica_waiting", "model replica"),
        ("replica_kv_usage_ratio", "model replica"),
        ("rejected_total", "tenant reason"),
        ("upstream_failures_total", "replica kind"),
        ("retries_total", ""),
        ("config_reloads_total", "result"),
        ("build_info", "version"),
    ],
)
def test_names_and_labels(name: str, names: str) -> None:
    assert labels(whole_page(), f"sekisho_{name}") == {frozenset(names.split())}


def test_everything_of_ours_has_the_prefix() -> None:
    assert all(name.startswith(("sekisho_", "process_")) for name in whole_page())


def test_an_empty_page_declares_every_metric() -> None:
    text = Metrics("1").page().decode()
    for name in (*HISTOGRAMS, "requests_total", "tokens_total", "rejected_total", "upstream_failures_total"):
        assert f"# TYPE sekisho_{name} " in text
    assert "sekisho_retries_total 0.0" in text


def test_requests_and_tokens() -> None:
    found = page(finished(), finished(), finished(operation="completions", usage=Usage(1, 1)))
    ok = {"tenant": "research", "model": "m", "operation": "chat", "status": "200", "code": ""}
    assert value(found, "requests_total", **ok) == 2
    assert value(found, "requests_total", **ok | {"operation": "completions"}) == 1
    kinds = {
        kind: value(found, "tokens_total", tenant="research", model="m", kind=kind)
        for kind in ("prompt", "cached", "completion")
    }
    assert kinds == {"prompt": 21, "cached": 8, "completion": 23}


def test_timings() -> None:
    found = page(finished())
    of = {"model": "m", "operation": "chat"}
    assert value(found, "request_duration_seconds_sum", **of) == pytest.approx(1.26)
    assert value(found, "time_to_first_token_seconds_sum", **of) == pytest.approx(0.21)
    assert value(found, "time_per_output_token_seconds_sum", **of) == pytest.approx(
        0.1
    )  # 1 s for ten tokens after the first
    assert value(found, "overhead_seconds_sum", phase="request") == pytest.approx(0.01)
    assert value(found, "overhead_seconds_sum", phase="response") == pytest.approx(0.05)


def test_waiting_for_the_clients_body_is_not_our_overhead() -> None:
    found = page(finished(started=90.0, waited_for_body=10.0))
    assert value(found, "overhead_seconds_sum", phase="request") == pytest.approx(0.01)


def test_a_retry_is_counted_and_not_taken_for_overhead() -> None:
    found = page(finished(attempts=3), finished(attempts=1))
    assert found["sekisho_retries_total"] == {frozenset(): 2.0}
    assert value(found, "overhead_seconds_count", phase="request") == 1


@pytest.mark.parametrize(
    "missing", [{"usage": None}, {"usage": Usage(5, 1)}, {"upstream_ended": 0.0}, {"first_token": 0.0}]
)
def test_times_that_are_not_known_are_not_invented(missing: dict[str, object]) -> None:
    found = page(finished(**missing))
    assert value(found, "time_per_output_token_seconds_count", model="m", operation="chat") == 0


@pytest.mark.parametrize("error", [AuthError(), RateLimited("x"), NoReplica("x"), ModelNotFound("x")])
def test_refusals_are_counted_by_reason(error: GatewayError) -> None:
    found = page(refused(error))
    assert value(found, "rejected_total", tenant="research", reason=error.code or "") == 1
    assert value(found, "request_duration_seconds_count", model="m", operation="chat") == 0


def test_what_an_engine_failed_at_is_no_rejection() -> None:
    found = page(failed(UpstreamTimeout("x")), failed(NoReplica("x"), attempts=1), refused(BadRequest("x")))
    assert "sekisho_rejected_total" not in found


# --- bounded
def test_hostile_names_make_no_series() -> None:
    """Thousands of invented models, users and keys fall into a handful of series and leave no trace in them."""
    random, metrics = Random(3), Metrics("1")
    for _ in range(2000):
        secret = f"secret-{random.getrandbits(64)}"
        metrics.record(refused(AuthError(), principal=None, model=None, asked=secret, request_id=secret))
        metrics.record(refused(ModelNotFound(secret), model=None, asked=secret))
        metrics.record(finished(asked=secret, request_id=secret))
    found = page(metrics=metrics)
    assert "secret" not in metrics.page().decode()
    assert len(found["sekisho_requests_total"]) == 3
    refusals = {"tenant": "unknown", "model": "unknown", "operation": "chat", "status": "401"}
    assert value(found, "requests_total", **refusals, code="invalid_api_key") == 2000
    assert sum(map(len, found.values())) < 250


def test_names_of_the_configuration_are_escaped() -> None:
    odd = replace(MODEL, name='a"b\\c\n漢字')
    rows = page(finished(model=odd))["sekisho_requests_total"]
    assert {dict(row)["model"] for row in rows} == {'a"b\\c\n漢字'}


def test_counters_only_grow() -> None:
    metrics, before = Metrics("1"), 0.0
    for _ in range(5):
        now = sum(page(finished(), metrics=metrics)["sekisho_requests_total"].values())
        assert now == before + 1
        before = now


@given(st.lists(st.floats(0, 100), max_size=50))
@settings(max_examples=100, deadline=None)
def test_histogram_buckets_are_cumulative(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for one in values:
        histogram.observe(one)
    expected = [sum(one <= bound for one in values) for bound in (0.1, 1.0, 10.0)]
    assert histogram.buckets() == [*zip(("0.1", "1.0", "10.0"), expected, strict=True), ("+Inf", len(values))]
    assert histogram.total == pytest.approx(sum(values))
