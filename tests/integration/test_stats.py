"""Metrics on their way: ranks into one report, reports into Prometheus families."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_dhisparse import __version__
from vllm_dhisparse.integration import stats as carrier
from vllm_dhisparse.integration.row_counters import HostRowCounters
from vllm_dhisparse.integration.stats import DHiSparsePromMetrics, DHiSparseStats
from vllm_dhisparse.metrics import EXTRA_PASSES, FETCHED_ROWS, METRICS, MODE_INFO, Metric

WAITS = Metric("waits_seconds", "histogram", "For tests.", (("phase", ("a", "b")),), (0.1, 1.0))
FETCHED = FETCHED_ROWS.key("decode")


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(carrier, "METRICS", (*METRICS, WAITS))
    return CollectorRegistry()


@pytest.fixture
def families(registry):
    """Of two engines, as with data parallel 2."""
    config = SimpleNamespace(
        kv_transfer_config=None,
        speculative_config=SimpleNamespace(method="dspark"),
        additional_config={"dhisparse": {"residency": "fixed"}},
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=64)),
    )
    types = {each: partial(each, registry=registry) for each in (Gauge, Counter, Histogram)}
    labels = {engine: ["tiny", str(engine)] for engine in (0, 1)}
    return DHiSparsePromMetrics(config, types, ["model_name", "engine"], labels)


def report(**counters):
    stats = DHiSparseStats()
    for key, amount in counters.items():
        stats.add(key, amount)
    return stats


def test_every_series_of_every_engine_exists_from_the_start(registry, families):
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, []).append(sample)
    assert set(found) == {name for m in (*METRICS, WAITS, MODE_INFO) for name in m.samples()}
    for metric in METRICS:
        name = metric.samples()[-1]  # of a histogram the count
        assert len(found[name]) == 2 * len(metric.series())
        assert {sample.value for sample in found[name]} == {0}
        assert all(
            set(sample.labels) == {"model_name", "engine", *(label for label, _ in metric.labels)}
            for sample in found[name]
        )
    assert [sample.labels for sample in found["vllm:dhisparse_mode_info"]] == [
        {
            "model_name": "tiny",
            "engine": engine,
            "residency": "fixed",
            "version": __version__,
            "vllm_version": vllm.__version__,
            "speculation": "dspark",
            "index_topk": "64",
        }
        for engine in ("0", "1")
    ]


def test_reports_of_one_engine_leave_the_other_alone(registry, families):
    families.observe(report(**{FETCHED: 5}).data, engine_idx=1)
    families.observe(report(**{FETCHED: 2}).data, engine_idx=1)
    name, labels = "vllm:dhisparse_fetched_rows_total", {"model_name": "tiny", "phase": "decode"}
    assert registry.get_sample_value(name, labels | {"engine": "1"}) == 7
    assert registry.get_sample_value(name, labels | {"engine": "0"}) == 0


def test_observations_land_in_their_buckets(registry, families):
    stats = DHiSparseStats()
    for value in (0.05, 0.5, 7.0):
        stats.observe(WAITS.key("b"), value)
    families.observe(stats.data, engine_idx=0)
    labels = {"model_name": "tiny", "engine": "0", "phase": "b"}
    buckets = [
        registry.get_sample_value("vllm:dhisparse_waits_seconds_bucket", labels | {"le": bound})
        for bound in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [1, 2, 3]


def test_ranks_add_up_and_the_last_level_counts():
    first, second = report(**{FETCHED: 3}), report(**{FETCHED: 4, "other": 1})
    first.data["gauges"]["level"], second.data["gauges"]["level"] = 1.0, 2.0
    first.observe("waits_seconds/a", 0.5)
    second.observe("waits_seconds/a", 0.7)
    copied = DHiSparseStats(first.data).aggregate(second)
    assert copied.data == {
        "counters": {FETCHED: 7, "other": 1},
        "gauges": {"level": 2.0},
        "observations": {"waits_seconds/a": [0.5, 0.7]},
    }
    assert copied.reduce()["dhisparse fetched rows"] == 7
    copied.reset()
    assert copied.is_empty()


@pytest.mark.parametrize("counts_rows", [True, False], ids=["rank 0", "another rank"])
def test_one_rank_counts_rows_and_passes_and_all_count_bytes(counts_rows):
    counters = HostRowCounters(counts_rows, [10])
    counts = torch.ones(2, 4, dtype=torch.int64)
    resolution = SimpleNamespace(selected=counts, fetched=counts[:, 0], plans=(0, 0, 0))
    metadata = SimpleNamespace(verifies=False, num_actual_tokens=5)
    counters.add_resolution(resolution, metadata, index_group=0)
    counted = counters.take_stats().data["counters"]
    assert counted["transfer_bytes/host_to_device"] == 20
    assert counted["transfer_bytes/device_to_host"] == 50
    assert counted.get(FETCHED, 0) == int(counts_rows)
    assert counted.get(EXTRA_PASSES.key(), 0) == 2 * counts_rows
