"""Dashboards as data, and their JSON in vLLM's conventions (schema 39)."""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from variables import DATASOURCE, link, variables

WIDTH = 24


class Target(NamedTuple):
    """One query and how its series are called; ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One panel, a tile or a graph by its place.

    ``unit``: Grafana's name. ``is_stacked``: the series sum to something. ``thresholds``:
    (from, colour), only where a value is good or bad. ``shows_name``: a tile that names its
    series instead of its value.
    """

    title: str
    targets: tuple[Target, ...]
    unit: str
    description: str
    is_stacked: bool = False
    thresholds: tuple[tuple[float, str], ...] = ()
    maximum: float | None = None
    shows_name: bool = False


class Row(NamedTuple):
    """Panels under one heading, two in a line."""

    title: str
    panels: tuple[Panel, ...]


class Dashboard(NamedTuple):
    """``tiles``: six figures at the top."""

    uid: str
    title: str
    description: str
    tiles: tuple[Panel, ...]
    rows: tuple[Row, ...]


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Return the JSON document of a dashboard."""
    return {
        "annotations": {"list": []},
        "description": dashboard.description,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [link()],
        "panels": [{"id": number, **each} for number, each in enumerate(_laid_out(dashboard), 1)],
        "refresh": "30s",
        "schemaVersion": 39,
        "tags": ["vllm", "dhisparse"],
        "templating": {"list": variables()},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": dashboard.title,
        "uid": dashboard.uid,
        "version": 1,
        "weekStart": "",
    }


def metric_names(panel: Panel) -> list[str]:
    """Return the names of all samples that a panel asks for."""
    text = " ".join(target.expr for target in panel.targets)
    return sorted(set(re.findall(r"vllm:\w+", text)))


def _laid_out(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    width = WIDTH // len(dashboard.tiles)
    for number, tile in enumerate(dashboard.tiles):
        yield _panel(tile, "stat", {"h": 4, "w": width, "x": number * width, "y": 0})
    y = 4
    for row in dashboard.rows:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": place,
        }
        y += 1
        for number, panel in enumerate(row.panels):
            place = {
                "h": 8,
                "w": WIDTH // 2,
                "x": number % 2 * WIDTH // 2,
                "y": y + number // 2 * 8,
            }
            yield _panel(panel, "timeseries", place)
        y += (len(row.panels) + 1) // 2 * 8


def _panel(
    panel: Panel, kind: Literal["stat", "timeseries"], place: dict[str, int]
) -> dict[str, Any]:
    is_stat = kind == "stat"
    return {
        "type": kind,
        "title": panel.title,
        "description": f"{panel.description} Metrics: {', '.join(metric_names(panel))}.",
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field(panel, is_stat), "overrides": []},
        "options": _stat_options(panel) if is_stat else _graph_options(),
        "targets": [
            {
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": target.expr,
                "legendFormat": target.legend,
                "range": True,
                "refId": chr(ord("A") + number),
            }
            for number, target in enumerate(panel.targets)
        ],
    }


def _field(panel: Panel, is_stat: bool) -> dict[str, Any]:
    mapping = {"match": "null+nan", "result": {"text": "No traffic"}}
    steps = [{"color": "green" if panel.thresholds else "text", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.thresholds]
    field: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "mappings": [{"type": "special", "options": mapping}],
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if is_stat else "palette-classic"},
    }
    if panel.maximum is not None:
        field["max"] = panel.maximum
    if not is_stat:
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.is_stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
        }
    return field


def _stat_options(panel: Panel) -> dict[str, Any]:
    return {
        "colorMode": "value",
        "graphMode": "none" if panel.shows_name else "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if panel.shows_name else "auto",
    }


def _graph_options() -> dict[str, Any]:
    return {
        "legend": {
            "calcs": ["mean", "lastNotNull"],
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
