"""deploy/grafana: dashboards as Grafana's own types read them, and every query of theirs at a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import ROOT
from tests.deploy.observed import Observed, dashboards
from tests.servers.prometheus import Prometheus

FOLDER = ROOT / "deploy/grafana"
DASHBOARDS = dashboards()
VARIABLES = {"model": ".*", "tenant": ".*", "__rate_interval": "1m", "__range": "5m"}
# Rightly nothing but zeros while all is well: no usage is lost, Redis is in time, the database takes records at once.
ZEROS = {"Usage records lost", "Redis not in time", "Usage records that wait"}

each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)
needs_prometheus = pytest.mark.skipif(not Prometheus.available(), reason="prometheus and promtool are not installed")


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]


def variables(name: str) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in DASHBOARDS[name]["templating"]["list"]}


def filled(expression: str, instance: str = ".*") -> str:
    """As Grafana fills in variables."""
    values = VARIABLES | {"instance": instance}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], expression)


# --- the files
def test_what_they_are() -> None:
    assert len(DASHBOARDS) == 5
    assert len({one["uid"] for one in DASHBOARDS.values()}) == len({one["title"] for one in DASHBOARDS.values()}) == 5
    assert all(f"{one['uid']}.json" == name for name, one in DASHBOARDS.items())


def test_files_are_what_the_script_makes() -> None:
    done = subprocess.run(
        [sys.executable, "-B", str(FOLDER / "build.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@each_dashboard
def test_a_dashboard_for_any_grafana(name: str) -> None:
    """Nothing of the Grafana it was made in: no ids, and whichever Prometheus is chosen."""
    one = DASHBOARDS[name]
    assert one["id"] is None and one["schemaVersion"] == 41
    source = variables(name)["datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert set(variables(name)) <= {"datasource", "instance", "model", "tenant"}
    sources = [target["datasource"] for panel in panels(name) for target in panel["targets"]]
    sources += [panel["datasource"] for panel in panels(name)]
    sources += [variable["datasource"] for variable in variables(name).values() if variable["type"] == "query"]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert len({panel["id"] for panel in one["panels"]}) == len(one["panels"])


@each_dashboard
def test_panels_lie_beside_each_other(name: str) -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


@each_dashboard
def test_variables_are_used_and_known(name: str) -> None:
    used = {found for panel in panels(name) for target in panel["targets"]
            for found in re.findall(r"\$\{?(\w+)", target["expr"])}  # fmt: skip
    assert used - {"__rate_interval", "__range"} == set(variables(name)) - {"datasource"}


@each_dashboard
def test_grafanas_own_types_lose_nothing(name: str) -> None:
    """Read and written by the library that is generated from Grafana's schemas: what it does not know would be gone."""
    pytest.importorskip("grafana_foundation_sdk", reason="pip install grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    written = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARDS[name])))
    assert not list(lost(DASHBOARDS[name], written, name))


def lost(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Where `theirs` lacks what `ours` has. What is null or empty need not be written."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            if value not in (None, [], {}):
                if not isinstance(theirs, dict) or key not in theirs:
                    yield f"{path}.{key}"
                else:
                    yield from lost(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list):
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            yield path
            return
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{path}[{place}]")
    elif ours != theirs:
        yield f"{path}: {ours} is {theirs}"


def test_the_comparison_notices() -> None:
    ours = {"a": [{"b": 1, "c": None}], "d": {"e": 2}}
    assert not list(lost(ours, {"a": [{"b": 1}], "d": {"e": 2}, "f": 3}, ""))
    assert list(lost(ours, {"a": [{}], "d": {"e": 3}}, "")) == [".a[0].b", ".d.e: 2 is 3"]


def test_provisioning() -> None:
    ours, compose = FOLDER / "provisioning", ROOT / "deploy/compose/grafana"
    for folder in (ours, compose):
        (provider,) = yaml.safe_load((folder / "dashboards/sekisho.yaml").read_text())["providers"]
        assert provider["type"] == "file" and provider["options"]["path"] == "/var/lib/grafana-dashboards"
    sources = yaml.safe_load((ours / "datasources/sekisho.yaml").read_text())["datasources"]
    assert [source["type"] for source in sources] == ["prometheus", "tempo"]
    (leads,) = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert leads == {"name": "trace_id", "datasourceUid": sources[1]["uid"]}


def test_documentation_names_every_dashboard() -> None:
    text = (ROOT / "docs/monitoring.md").read_text()
    assert not [one["title"] for one in DASHBOARDS.values() if f"**{one['title'].partition(' / ')[2]}**" not in text]


# --- with a server
@needs_prometheus
@each_dashboard
def test_every_panel_has_data(name: str, observed: Observed) -> None:
    """Every query is understood, and finds figures that are not all zero."""
    missing = {(panel["title"], target["expr"]) for panel in panels(name) for target in panel["targets"]}

    def has_data(title: str, expression: str) -> bool:
        values = observed.prometheus.values(filled(expression))
        return bool(values) if title in ZEROS else any(values)

    def complete() -> bool:
        missing.difference_update([one for one in missing if has_data(*one)])
        return not missing

    assert observed.until(complete), missing


@needs_prometheus
@each_dashboard
def test_every_variable_has_values(name: str, observed: Observed) -> None:
    wanted = {
        "instance": set(observed.targets[:2]), "tenant": {"red", "blue", "poor", "unknown"},
        "model": {"m", "shaky", "busy", "full", "old", "away"},
    }  # fmt: skip

    def values(variable: dict[str, Any]) -> set[str]:
        metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        return set(observed.prometheus.ask(f"label/{label}/values", **{"match[]": filled(metric)}))

    for variable in variables(name).values():
        if variable["type"] == "query":
            assert observed.until(lambda: values(variable) >= wanted[variable["name"]]), values(variable)  # noqa: B023


@needs_prometheus
def test_one_of_several_gateways(observed: Observed) -> None:
    """A chosen gateway's figures are its own."""
    shown = observed.prometheus.query(filled('sekisho_replica_up{instance=~"$instance"}', observed.targets[1]))
    assert [series["metric"]["instance"] for series in shown] == [observed.targets[1]]
