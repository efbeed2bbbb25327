"""The dashboards' JSON, without a Prometheus."""

import json
import re
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest
from generate import DASHBOARDS
from panels import document
from queries import level, quantile, rate, series

from vllm_dhisparse.metrics import FETCHED_ROWS, METRICS, MODE_INFO, SELECTED_ROWS, Metric

GRAFANA = Path(__file__).parents[2] / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
OURS = {name for metric in (*METRICS, MODE_INFO) for name in metric.samples()}
NAME = re.compile(r"vllm:\w+")


@pytest.fixture(scope="module")
def defined():
    """Names of all samples that vLLM or this package defines in its code."""
    root = Path(find_spec("vllm").origin).parent
    sources = [*root.glob("v1/metrics/*.py"), *root.glob("v1/spec_decode/metrics.py")]
    stock = {name for source in sources for name in NAME.findall(source.read_text())}
    assert "vllm:num_requests_running" in stock
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    return OURS | {name + suffix for name in stock for suffix in suffixes}


def panels(path):
    return [p for p in json.loads(path.read_text())["panels"] if p["type"] != "row"]


def test_every_dashboard_has_a_file_and_every_file_a_dashboard():
    assert {json.loads(path.read_text())["uid"] for path in FILES} == {d.uid for d in DASHBOARDS}
    assert len(FILES) == len(DASHBOARDS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ids_places_and_sources(path):
    found = json.loads(path.read_text())
    assert found["schemaVersion"] == 39
    assert found["id"] is None
    assert found["tags"] == ["vllm", "dhisparse"]
    names = [each["name"] for each in found["templating"]["list"]]
    assert names == ["datasource", "job", "model_name", "instance", "engine", "filters"]
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(path):
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
    assert [p["type"] for p in found["panels"]].count("stat") == 6
    for one, other in combinations([p["gridPos"] for p in found["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
        assert one["x"] + one["w"] <= 24


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_query_follows_the_selection_and_asks_for_what_exists(path, defined):
    for panel in panels(path):
        for target in panel["targets"]:
            names = NAME.findall(target["expr"])
            assert names
            assert set(names) <= defined, panel["title"]
            for variable in ("job", "model_name", "instance", "engine"):
                assert target["expr"].count(f'{variable}=~"${variable}"') == len(names)
            assert all(name in panel["description"] for name in names)
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), panel["title"]


def test_every_metric_of_ours_is_on_a_dashboard():
    text = " ".join(json.dumps(document(dashboard)) for dashboard in DASHBOARDS)
    assert {name for name in OURS if not re.search(rf"{name}\b", text)} <= {
        name for name in OURS if name.endswith(("_sum", "_count"))
    }


def test_alerts_ask_for_what_exists():
    text = (GRAFANA / "rules" / "dhisparse.rules.yaml").read_text()
    assert set(NAME.findall(text)) <= OURS
    alerts = set(re.findall(r"alert: (\w+)", text))
    tested = (GRAFANA / "rules" / "dhisparse.rules_test.yaml").read_text()
    assert alerts == set(re.findall(r"alertname: (\w+)", tested))


@pytest.mark.parametrize(
    "labels", [{"tier": "gpu"}, {"phase": ("decode", "draft")}, {"direction": "h2d"}]
)
def test_a_query_for_labels_that_do_not_exist_is_refused(labels):
    with pytest.raises(ValueError, match="selected_rows has no"):
        series(SELECTED_ROWS, **labels)


def test_what_queries_look_like():
    where = ", ".join(f'{v}=~"${v}"' for v in ("job", "model_name", "instance", "engine"))
    name = "vllm:dhisparse_fetched_rows_total"
    assert rate(FETCHED_ROWS, "phase") == (
        f"sum by (phase) (rate({name}{{{where}}}[$__rate_interval]))"
    )
    assert level("vllm:up", kind=("a", "b")) == f'sum (vllm:up{{{where}, kind=~"a|b"}})'
    waits = Metric("waits_seconds", "histogram", "", (("phase", ("a",)),), (1.0,))
    assert quantile(0.5, waits, phase="a") == (
        f"histogram_quantile(0.5, sum by (le) (rate(vllm:dhisparse_waits_seconds_bucket"
        f'{{{where}, phase="a"}}[$__rate_interval])))'
    )
