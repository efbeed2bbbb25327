"""What the package reports: names, labels and meaning, independent of how it is carried.

Values travel as plain mappings from a flat key (see `Metric.key`) to a number, so
that they cross process borders as they are. Counters add up; gauges hold the last.
"""

from itertools import product
from typing import Literal, NamedTuple

from vllm_dhisparse.config import RESIDENCIES

PREFIX = "vllm:dhisparse_"
TIERS = ("tail", "required", "optional", "host")
PHASES = ("prefill", "decode", "verify")
AGES = ("0", "1", "2", "3")
RESIDENCY_CLASSES = ("tail", "required", "optional", "indexer", "draft_ring", "free")


class Metric(NamedTuple):
    """One family on /metrics; every combination of label values exists from the start.

    ``buckets``: upper bounds of a histogram, ascending, in the unit of its name.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()

    def samples(self) -> tuple[str, ...]:
        """Return the names of its samples on /metrics."""
        name = PREFIX + self.name
        if self.kind == "histogram":
            return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
        return (f"{name}_total",) if self.kind == "counter" else (name,)

    def key(self, *values: str) -> str:
        """Return the flat key of one series, label values in the order of ``labels``."""
        assert len(values) == len(self.labels), (self.name, values)
        for (_, allowed), value in zip(self.labels, values, strict=True):
            assert value in allowed, (self.name, value)
        return "/".join((self.name, *values))

    def series(self) -> list[tuple[str, ...]]:
        """Return all combinations of label values."""
        return list(product(*(values for _, values in self.labels)))


SELECTED_ROWS = Metric(
    "selected_rows",
    "counter",
    "Rows chosen by the indexer, by where they were found; once per index group. "
    "In residency `resident` all history is tail.",
    (("tier", TIERS), ("phase", PHASES)),
)
FETCHED_ROWS = Metric(
    "fetched_rows",
    "counter",
    "Rows copied from host to device after the queries of a step shared their misses; "
    "once per index group. Fetch ratio = fetched / selected over decode and verify.",
    (("phase", PHASES),),
)
TRANSFER_BYTES = Metric(
    "transfer_bytes",
    "counter",
    "Latent KV bytes moved between device and host memory.",
    (("direction", ("host_to_device", "device_to_host")),),
)
RESIDENCY_BYTES = Metric(
    "residency_bytes",
    "gauge",
    "Device KV memory by use, of one tensor-parallel rank; the classes sum to the capacity. "
    "draft_ring: all draft KV.",
    (("residency_class", RESIDENCY_CLASSES),),
)
RESIDENCY_ROWS = Metric(
    "residency_rows",
    "gauge",
    "Rows that the row cache has room for, in each index group.",
    (("residency_class", ("required", "optional")),),
)

HOST_POOL_PAGES = Metric(
    "host_pool_pages",
    "gauge",
    "Host pages: held by running requests, idle (history that a prefix hit may use), free.",
    (("state", ("held", "idle", "free")),),
)
HOST_POOL_BYTES = Metric(
    "host_pool_capacity_bytes",
    "gauge",
    "Host memory of the pool, all ranks of the engine.",
)
HOST_POOL_WAITS = Metric(
    "host_pool_waits",
    "counter",
    "Times that host pages were missing, so that a request had to wait or one was preempted.",
)
EXTRA_PASSES = Metric(
    "extra_passes",
    "counter",
    "Passes beyond a step's first, because the rows of the step were more than staging holds; "
    "once per index group.",
)
UNION_ROWS = Metric(
    "request_union_rows",
    "histogram",
    "Distinct rows that a request reads in a step, prefill apart; of one index group at a time, "
    "every `stats_interval_steps`.",
    buckets=tuple(2.0**power for power in range(6, 16)),
)
SAMPLED_HITS = Metric(
    "sampled_hits",
    "counter",
    "Rows found in the row cache, by their age before: 3 = used since the hand of the CLOCK last "
    "passed, 0 = about to go or new; of one index group at a time, every `stats_interval_steps`.",
    (("age", AGES),),
)
WORKING_SET_ROWS = Metric(
    "working_set_rows",
    "gauge",
    "Cached rows that get all but a hundredth of the hits, and those just fetched; of one index "
    "group, when last sampled.",
)

STAGING_ACQUIRES = Metric(
    "staging_acquires",
    "counter",
    "Times that a layer took the one staging area for a pass over the rows of a step.",
    (("phase", PHASES),),
)
RETRIEVAL_SECONDS = Metric(
    "retrieval_seconds",
    "counter",
    "Time in which workers resolved selections and brought their rows to staging. A step that "
    "generates counts as decode or verify, prompts in it included.",
    (("phase", PHASES),),
)
DRAFT_RING_ROWS = Metric(
    "draft_ring_rows",
    "gauge",
    "Rows of draft rings, of one layer: held by running requests; written, of them with tokens.",
    (("state", ("held", "written")),),
)
DRAFT_RING_WRAPS = Metric(
    "draft_ring_wraps",
    "counter",
    "Times that a request's draft ring came back to its first block.",
)

CONTROLLER_STATES = ("grow", "hold", "shrink", "reclaim")
KV_PRESSURE = Metric(
    "kv_pressure_ratio",
    "gauge",
    "Share of the device KV memory that running and waiting requests require, 0 to 1.",
)
CONTROLLER_STATE = Metric(
    "controller_state",
    "gauge",
    "What the residency controller does now: 1 for one of the states.",
    (("state", CONTROLLER_STATES),),
)
CONTROLLER_DECISIONS = Metric(
    "controller_decisions",
    "counter",
    "Steps by what the residency controller did in them.",
    (("action", CONTROLLER_STATES),),
)
CONTROLLER_TARGETS = Metric(
    "controller_target_units",
    "gauge",
    "Units that the residency controller wants taken out of spare memory in this step, and how "
    "many of them filled at once.",
    (("action", ("adopt", "restore")),),
)
DRAFT_LIMIT = Metric(
    "draft_tokens_limit",
    "gauge",
    "Draft tokens that a request may have in a step; lower where memory is too short for more.",
)
ADOPTED_UNITS = Metric(
    "adopted_units",
    "counter",
    "Units of 64 rows per latent layer taken out of spare memory; restored: filled at once.",
    (("content", ("empty", "restored")),),
)
RECLAIMED_BYTES = Metric(
    "reclaimed_bytes",
    "counter",
    "Optional device memory given back: taken by vLLM (pressure) or kept plain (reserve).",
    (("reason", ("pressure", "reserve")),),
)

MODE_INFO = Metric(
    "mode_info",
    "gauge",
    "How this engine runs; always 1.",
    (
        ("residency", RESIDENCIES),
        ("version", ()),
        ("vllm_version", ()),
        ("speculation", ()),
        ("index_topk", ()),
    ),
)
"""Labels without values here have one that is known at start-up."""

METRICS = (
    SELECTED_ROWS,
    FETCHED_ROWS,
    TRANSFER_BYTES,
    RESIDENCY_BYTES,
    RESIDENCY_ROWS,
    HOST_POOL_PAGES,
    HOST_POOL_BYTES,
    HOST_POOL_WAITS,
    EXTRA_PASSES,
    UNION_ROWS,
    SAMPLED_HITS,
    WORKING_SET_ROWS,
    STAGING_ACQUIRES,
    RETRIEVAL_SECONDS,
    DRAFT_RING_ROWS,
    DRAFT_RING_WRAPS,
    KV_PRESSURE,
    CONTROLLER_STATE,
    CONTROLLER_DECISIONS,
    CONTROLLER_TARGETS,
    DRAFT_LIMIT,
    ADOPTED_UNITS,
    RECLAIMED_BYTES,
)
"""Families with known series. `MODE_INFO` is the only other one."""
