"""Every query of every panel, on a real Prometheus that scraped a real server under load."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine import prompts
from generate import DASHBOARDS
from panels import Panel, Target
from pictures import draw
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import find, query_range, scraping
from queries import level, rate
from render import Window, ask, ask_panel
from server import serving

from vllm_dhisparse.metrics import (
    FETCHED_ROWS,
    HOST_POOL_PAGES,
    METRICS,
    MODE_INFO,
    RESIDENCY_BYTES,
    SELECTED_ROWS,
)

BENCH = Path(__file__).parents[2] / "examples" / "bench" / "bench.py"
PROMETHEUS = find("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="no Prometheus here: bash grafana/get_prometheus.sh"
)
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
# The history of the load is twice what the device holds.
OPTIONS = ("--kv-cache-memory-bytes", "24M", "--speculative-config", DRAFTS)
LONG, OTHERS = 2, 8
PROMPT_TOKENS = 1500


def load(server):
    """Two requests alone, ten together, and two alone again."""

    def ask_for(ids, tokens):
        server.post("/v1/completions", prompt=ids, max_tokens=tokens, ignore_eos=True)

    asked = prompts(*[PROMPT_TOKENS] * (LONG + OTHERS))
    with ThreadPoolExecutor(LONG + OTHERS) as pool:
        long = [pool.submit(ask_for, ids, 300) for ids in asked[:LONG]]
        time.sleep(4)
        others = [pool.submit(ask_for, ids, 40) for ids in asked[LONG:]]
        for each in [*others, *long]:
            each.result()
    time.sleep(2)  # the last scrape


@pytest.fixture(scope="module")
def seen(tiny_dsa, tmp_path_factory):
    """Address of the Prometheus, window of the load, and the server."""
    folder = tmp_path_factory.mktemp("prometheus")
    model = tiny_dsa(layers=6, leaders=2)
    with (
        serving(model, folder, *OPTIONS) as server,
        scraping(PROMETHEUS, [f"127.0.0.1:{server.port}"], folder) as address,
    ):
        time.sleep(3)
        start = time.time() - 2
        load(server)
        yield address, Window(start, time.time()), server


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_no_panel_fails_or_is_empty(seen, tmp_path, dashboard):
    address, window, _ = seen
    results = ask(address, dashboard, window)
    assert len(results) == len(dashboard.tiles) + sum(len(row.panels) for row in dashboard.rows)
    assert not [problem for result in results for problem in result.problems]
    for result in results:
        shares = result.panel.unit == "percentunit"
        for name, series in result.series:
            assert min(series.values) >= 0, (result.panel.title, name)
            assert not shares or max(series.values) <= 1 + 1e-9, (result.panel.title, name)
    draw(dashboard, results, window, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000


def test_the_load_is_in_the_figures(seen):
    address, window, _ = seen

    def values(expr):
        (series,) = query_range(address, window.filled(expr), window.start, window.end, 1)
        return series.values

    running = values(level("vllm:num_requests_running"))
    assert max(running) > LONG
    assert running[-1] == 0
    capacity = values(level(RESIDENCY_BYTES))
    assert len(set(capacity[-10:])) == 1
    optional = values(level(RESIDENCY_BYTES, residency_class="optional"))
    assert max(optional) > 0
    assert max(values(level(HOST_POOL_PAGES, state="held"))) > 0
    fetched, selected = (
        values(f"sum (increase(vllm:dhisparse_{m.name}_total[{len(running)}s]))")[-1]
        for m in (FETCHED_ROWS, SELECTED_ROWS)
    )
    assert 0 < fetched < selected
    assert max(values(rate(SELECTED_ROWS, phase="verify"))) > 0


def test_the_server_shows_what_the_code_defines_and_nothing_else(seen):
    found = {
        sample.name
        for family in text_string_to_metric_families(seen[2].get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("vllm:dhisparse_") and not sample.name.endswith("_created")
    }
    assert found == {name for metric in (*METRICS, MODE_INFO) for name in metric.samples()}


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("vllm:dhisparse_no_such_metric", "no data"),
        ("sum by (tier (vllm:num_requests_running)", "parse error"),
        ("0 * vllm:num_requests_running / 0", "no data"),
    ],
)
def test_an_empty_or_broken_panel_is_a_problem(seen, expr, problem):
    panel = Panel("Broken", (Target(expr, "x"),), "short", "For this test.")
    (found,) = ask_panel(seen[0], panel, seen[1]).problems
    assert problem in found


def test_a_benchmark_on_the_server_reports_what_dhisparse_did(seen, tiny_dsa, tmp_path):
    model = str(tiny_dsa(layers=6, leaders=2))
    size = ["--random-input-len", "900", "--random-output-len", "20", "--ignore-eos"]
    options = ["--model", "tiny", "--tokenizer", model, "--port", str(seen[2].port), *size]
    options += ["--dataset-name", "random", "--num-prompts", "4", "--max-concurrency", "4"]
    result = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "run.json"]
    done = subprocess.run(
        [sys.executable, str(BENCH), *options, *result], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert " DHISPARSE " in done.stdout
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["completed"] == 4
    assert found["dhisparse_residency"] == "adaptive"
    # At most 19 steps of 1 + 3 queries, 64 rows of two index groups for each.
    assert 0 < found["dhisparse_selected_rows"] <= 4 * 19 * 4 * 64 * 2
    assert 0 <= found["dhisparse_fetch_ratio"] < 1
