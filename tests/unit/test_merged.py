"""The metrics of several workers as one page."""

import pickle

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics, page
from gateway.outcome import Outcome
from gateway.workers.merged import lasting, merge


def worker(requests: int, seconds: float = 0.2) -> list[Metric]:
    metrics = Metrics("1")
    for _ in range(requests):
        outcome = Outcome("chat", "req", 10.0)
        outcome.status, outcome.sent, outcome.ended, outcome.attempts = 200, 10.0, 10.0 + seconds, 1
        metrics.record(outcome)
    found: list[Metric] = pickle.loads(pickle.dumps(metrics.collect()))  # as between processes
    return found


def values(families: list[Metric]) -> dict[tuple[str, str], float]:
    text = page(families)[0].decode()
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith("sekisho_request") or family.name.startswith("sekisho_build")
    }


def test_counters_and_histograms_are_sums() -> None:
    found = values(merge([worker(3), worker(4, seconds=20.0)]))
    assert found["sekisho_requests_total", ""] == 7
    assert found["sekisho_request_duration_seconds_count", ""] == 7
    assert found["sekisho_request_duration_seconds_bucket", "0.25"] == 3
    assert found["sekisho_request_duration_seconds_bucket", "+Inf"] == 7
    assert found["sekisho_build_info", ""] == 1


def test_what_a_dead_worker_has_counted_stays_and_its_gauges_go() -> None:
    gauge = GaugeMetricFamily("sekisho_inflight_requests", "", labels=("model",))
    gauge.add_metric(("m",), 5)
    dead = [*worker(3), gauge]
    found = merge([lasting(dead), worker(2)])
    assert values(found)["sekisho_requests_total", ""] == 5
    assert "sekisho_inflight_requests" not in {family.name for family in found}


def test_gauges_have_one_meaning() -> None:
    def page_of(**given: float) -> list[Metric]:
        families: list[Metric] = []
        for name, value in given.items():
            family = GaugeMetricFamily(f"sekisho_{name}", "", labels=("replica",))
            family.add_metric(("r",), value)
            families.append(family)
        return families

    found = merge([
        page_of(inflight_requests=2, replica_up=0, database_up=1, replica_running=7),
        page_of(inflight_requests=3, replica_up=1, database_up=0, replica_running=6),
    ])
    assert {family.name: family.samples[0].value for family in found} == {
        "sekisho_inflight_requests": 5, "sekisho_replica_up": 1, "sekisho_database_up": 0, "sekisho_replica_running": 7,
    }  # fmt: skip


def test_pages_are_not_changed_by_merging() -> None:
    one, two = worker(1), worker(1)
    before = page(one)[0]
    merge([one, two])
    assert page(one)[0] == before
