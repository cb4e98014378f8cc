"""Parts of Grafana dashboards as the JSON that Grafana reads, by schema version 41 (Grafana 12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

JSON: TypeAlias = dict[str, Any]
Query: TypeAlias = tuple[str, str]  # expression, legend

SCHEMA_VERSION = 41
WIDTH = 24  # columns of Grafana's grid
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


# --- panels
def lines(
    title: str, unit: str, *queries: Query, text: str = "", width: int = 12, stacked: bool = False,
    most: float | None = None, exemplars: bool = False,
) -> JSON:  # fmt: skip
    """Series over time. `most`: where the axis ends. `exemplars`: points that lead to traces."""
    custom = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 25 if stacked else 8, "showPoints": "never",
        "spanNulls": False, "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }  # fmt: skip
    defaults: JSON = {"unit": unit, "min": 0, "custom": custom}
    if most is not None:
        defaults["max"] = most
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    targets = [_target(place, *query, exemplar=exemplars) for place, query in enumerate(queries)]
    return _panel("timeseries", title, text, (width, 8), targets, defaults, options)


def number(
    title: str, unit: str, expression: str, *, text: str = "", limits: Sequence[float] = (), low: bool = False
) -> JSON:
    """One value. `limits`: from where it is yellow and from where red; with `low` those below which it is."""
    colours = ["red", "yellow", "green"] if low else ["green", "yellow", "red"]
    steps: list[JSON] = [{"color": colours[0] if limits else "text", "value": None}]
    steps += [{"color": colour, "value": limit} for colour, limit in zip(colours[1:], limits, strict=False)]
    defaults = {"unit": unit, "noValue": "0", "thresholds": {"mode": "absolute", "steps": steps}}
    options = {
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto", "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "percentChangeColorMode": "standard", "showPercentChange": False, "wideLayout": True,
    }  # fmt: skip
    return _panel("stat", title, text, (4, 4), [_target(0, expression, "")], defaults, options)


def states(title: str, expression: str, legend: str, words: Sequence[str], *, text: str = "", width: int = 24) -> JSON:
    """Bars over time of what is 0 or 1. `words`: for 0, which is red, and for 1, which is green."""
    shown = {str(value): {"text": word, "color": colour, "index": value}
             for value, (word, colour) in enumerate(zip(words, ("red", "green"), strict=True))}  # fmt: skip
    defaults = {"mappings": [{"type": "value", "options": shown}], "custom": {"fillOpacity": 70, "lineWidth": 0}}
    options = {
        "mergeValues": True, "showValue": "never", "rowHeight": 0.8, "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }  # fmt: skip
    return _panel("state-timeline", title, text, (width, 8), [_target(0, expression, legend)], defaults, options)


def heat(title: str, unit: str, metric: str, where: str) -> JSON:
    """How many observations of a histogram fell where."""
    expression = f"sum by (le) (increase({metric}_bucket{{{where}}}[$__rate_interval]))"
    options = {
        "calculate": False, "cellGap": 1, "showValue": "never", "legend": {"show": True},
        "color": {"mode": "scheme", "scheme": "Oranges", "exponent": 0.5, "steps": 64, "reverse": False,
                  "fill": "dark-orange"},
        "exemplars": {"color": "rgba(255,0,255,0.7)"}, "filterValues": {"le": 1e-9},
        "rowsFrame": {"layout": "auto"}, "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "unit": unit, "reverse": False},
    }  # fmt: skip
    target = _target(0, expression, "{{le}}", exemplar=True) | {"format": "heatmap"}
    return _panel("heatmap", title, "", (12, 8), [target], {}, options)


def rows(
    title: str, expression: str, unit: str, *, text: str = "", hidden: Sequence[str] = (), width: int = 24
) -> JSON:
    """A table of what is true now: a column for each label but the hidden ones."""
    target = _target(0, expression, "") | {"format": "table", "instant": True, "range": False}
    footer = {"show": False, "reducer": ["sum"], "countRows": False}
    options = {"frameIndex": 0, "showHeader": True, "cellHeight": "sm", "footer": footer}
    panel = _panel("table", title, text, (width, 8), [target], {"unit": unit}, options)
    excluded = dict.fromkeys(("Time", *hidden), True)
    organise = {"excludeByName": excluded, "indexByName": {}, "renameByName": {}, "includeByName": {}}
    return panel | {"transformations": [{"id": "organize", "options": organise}]}


def heading(title: str) -> JSON:
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": WIDTH, "h": 1}}


def _panel(
    kind: str, title: str, text: str, size: tuple[int, int], targets: list[JSON], defaults: JSON, options: JSON
) -> JSON:
    return {
        "type": kind, "title": title, "description": text, "datasource": SOURCE,
        "gridPos": {"w": size[0], "h": size[1]}, "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
    }  # fmt: skip


def _target(place: int, expression: str, legend: str, *, exemplar: bool = False) -> JSON:
    target = {
        "refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend,
        "range": True, "instant": False, "editorMode": "code",
    }  # fmt: skip
    return target | {"exemplar": True} if exemplar else target


# --- dashboards
def dashboard(uid: str, title: str, text: str, variables: Sequence[JSON], panels: Sequence[JSON]) -> JSON:
    return {
        "id": None, "uid": uid, "title": f"Sekisho / {title}", "description": text, "tags": ["sekisho"],
        "schemaVersion": SCHEMA_VERSION, "version": 1, "editable": True, "graphTooltip": 1, "fiscalYearStartMonth": 0,
        "timezone": "browser", "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "timepicker": {},
        "templating": {"list": list(variables)}, "annotations": {"list": []},
        "links": [{
            "type": "dashboards", "title": "Sekisho", "tags": ["sekisho"], "asDropdown": True, "includeVars": True,
            "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": "",
        }],
        "panels": _placed(panels),
    }  # fmt: skip


def _placed(panels: Sequence[JSON]) -> list[JSON]:
    """In lines from left to right, with numbers of their own."""
    placed, x, y, height = list[JSON](), 0, 0, 0
    for ident, panel in enumerate(panels, 1):
        size = panel["gridPos"]
        if x + size["w"] > WIDTH:
            x, y, height = 0, y + height, 0
        placed.append(panel | {"id": ident, "gridPos": size | {"x": x, "y": y}})
        x, height = x + size["w"], max(height, size["h"])
    return placed


def source() -> JSON:
    """The variable that says which Prometheus."""
    return {
        "type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "regex": "",
        "hide": 0, "refresh": 1, "multi": False, "includeAll": False, "skipUrlSync": False, "options": [],
    }  # fmt: skip


def choice(name: str, label: str, query: str, *, everything: str | None = None) -> JSON:
    """A variable of which several values may be chosen. `everything`: what "All" stands for, else all listed."""
    variable: JSON = {
        "type": "query", "name": name, "label": label, "datasource": SOURCE,
        "query": {"query": query, "refId": f"{name}-values"}, "regex": "", "sort": 1, "refresh": 2, "hide": 0,
        "multi": True, "includeAll": True, "skipUrlSync": False, "options": [],
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    }  # fmt: skip
    return variable if everything is None else variable | {"allValue": everything}
