"""deploy/prometheus: what promtool says of it, and a real Prometheus that reads real gateways by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import ROOT
from tests.deploy.observed import Observed
from tests.e2e.harness import eventually
from tests.servers.prometheus import Prometheus, promtool

FOLDER = ROOT / "deploy/prometheus"
SCENARIOS = sorted((FOLDER / "tests").glob("*.yml"))
SEVERITIES = {"critical", "warning", "info"}

needs_prometheus = pytest.mark.skipif(not Prometheus.available(), reason="prometheus and promtool are not installed")


def _rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / f"rules/{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS, RECORDED = {rule["alert"]: rule for rule in _rules("alerts")}, {rule["record"] for rule in _rules("recording")}


def _fired() -> Iterator[dict[str, str]]:
    """Labels of every alert that some scenario of promtool makes fire."""
    for path in SCENARIOS:
        for sample in re.findall(r"'ALERTS\{([^}]*alertname[^}]*)\}', value: 1", path.read_text()):
            yield dict(re.findall(r'(\w+)="([^"]*)"', sample))


# --- without a server
@needs_prometheus
def test_rules() -> None:
    promtool("check", "rules", *(FOLDER / "rules").glob("*.yml"))


@needs_prometheus
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios(path: Path) -> None:
    """Whether what should fire does, when it should, and nothing else."""
    assert "SUCCESS" in promtool("test", "rules", path)


@needs_prometheus
def test_configurations(tmp_path: Path) -> None:
    """That of this folder and that of docker-compose.yml, with the files where this machine has them."""
    key = tmp_path / "key"
    key.write_text("sk-" + "x" * 48)
    ours, compose = tmp_path / "prometheus.yml", tmp_path / "compose.yml"
    text = (FOLDER / "prometheus.yml").read_text()
    assert "/etc/prometheus/sekisho.key" in text and "rules/*.yml" in text
    text = text.replace("/etc/prometheus/sekisho.key", str(key)).replace("rules/*.yml", f"{FOLDER}/rules/*.yml")
    ours.write_text(text)
    text = (ROOT / "deploy/compose/prometheus.yml").read_text()
    compose.write_text(text.replace("/etc/prometheus/sekisho/", f"{FOLDER}/"))
    for config in (ours, compose):
        said = promtool("check", "config", config)
        assert "2 rule files found" in said and said.count("rules found") == 2, said


def test_every_alert_says_what_to_do() -> None:
    runbooks = (ROOT / "docs/runbooks.md").read_text()
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", runbooks, re.M)}
    for name, rule in ALERTS.items():
        assert rule["labels"].keys() == {"severity"} and rule["labels"]["severity"] in SEVERITIES
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    assert {name.lower() for name in ALERTS} == anchors


def test_every_alert_is_seen_firing() -> None:
    """In some scenario, and with the labels that its texts speak of."""
    seen = {labels["alertname"]: labels for labels in _fired()}
    assert seen.keys() == ALERTS.keys()
    for name, rule in ALERTS.items():
        for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
            assert seen[name].get(label), f"{name}: {label}"
        assert seen[name]["severity"] == rule["labels"]["severity"]


def test_documentation_names_every_recorded_series() -> None:
    text = (ROOT / "docs/monitoring.md").read_text()
    for series in {name for name in RECORDED if "_bucket" not in name}:
        name, _, last = series.rpartition(":")
        assert f"`{name}:" in text and (f":{last}`" in text or f"`_{last.rpartition('_')[2]}`" in text), series


# --- with one
@needs_prometheus
def test_the_page_is_as_prometheus_likes_it(observed: Observed) -> None:
    assert observed.until(lambda: bool(observed.prometheus.query("sekisho_queue_wait_seconds_count")))
    promtool("check", "metrics", given=observed.gateway.metrics_page().encode())


@needs_prometheus
def test_gateways_are_read_by_key_and_by_address(observed: Observed) -> None:
    found = {series["metric"]["instance"]: series["value"][1] for series in observed.prometheus.query("up")}
    assert found == dict(zip(observed.targets, ["1", "1", "0"], strict=True))


@needs_prometheus
def test_every_rule_is_evaluated(observed: Observed) -> None:
    def settled() -> bool:
        return all(rule["health"] != "unknown" for rule in observed.prometheus.rules())

    assert eventually(settled)
    found = observed.prometheus.rules()
    assert {rule["name"] for rule in found} == ALERTS.keys() | RECORDED
    assert not [(rule["name"], rule["lastError"]) for rule in found if rule["health"] != "ok"]


@needs_prometheus
def test_every_recorded_series_is_there(observed: Observed) -> None:
    missing = set(RECORDED)

    def complete() -> bool:
        missing.difference_update([name for name in missing if observed.prometheus.values(name)])
        return not missing

    assert observed.until(complete), missing


def selectors(expression: str) -> set[str]:
    """The series that an expression asks for: `name` or `name{...}`."""
    found = re.findall(r"(?<![\w:\"])((?:\w+:)?(?:sekisho|process)_[\w:]+|up(?=\{))(\{[^}]*\})?", expression)
    return {name + labels for name, labels in found}


def test_selectors() -> None:
    assert selectors('sum(rate(sekisho_a_total{b="c"}[5m])) / m:sekisho_d:rate5m{e=~"f|g"} and up{h="i"} > up_to') == {
        'sekisho_a_total{b="c"}', 'm:sekisho_d:rate5m{e=~"f|g"}', 'up{h="i"}',
    }  # fmt: skip


@needs_prometheus
def test_what_rules_ask_for_exists(observed: Observed) -> None:
    """No mistyped name or label: every selector of every rule finds series of the gateways."""
    missing = {one for rule in _rules("alerts") + _rules("recording") for one in selectors(str(rule["expr"]))}
    assert len(missing) > 40

    def complete() -> bool:
        missing.difference_update([one for one in missing if observed.prometheus.values(one)])
        return not missing

    assert observed.until(complete), missing


@needs_prometheus
def test_alerts_of_these_situations(observed: Observed) -> None:
    """What is wrong here and needs no time to count as wrong; the texts are filled in."""
    wanted = {"SekishoWorkerRestarts", "SekishoConfigReloadFailed", "SekishoPromptsCut", "SekishoReplicaFailing",
              "SekishoCertificateExpires", "SekishoCertificateExpiresNow"}  # fmt: skip

    def firing() -> list[dict[str, Any]]:
        return [alert for alert in observed.prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"]

    assert observed.until(lambda: wanted <= {alert["labels"]["alertname"] for alert in firing()}), firing()
    for alert in firing():
        texts = " ".join(alert["annotations"].values())
        assert "<error" not in texts and "{{" not in texts and "<no value>" not in texts


@needs_prometheus
def test_exemplars_lead_to_traces(observed: Observed) -> None:
    def traced() -> bool:
        found = observed.prometheus.ask(
            "query_exemplars", query="sekisho_time_to_first_token_seconds_bucket", start=0, end=4e9
        )
        ids = [one["labels"]["trace_id"] for entry in found for one in entry["exemplars"]]
        return any(re.fullmatch(r"[0-9a-f]{32}", trace_id) for trace_id in ids)

    assert observed.until(traced)
