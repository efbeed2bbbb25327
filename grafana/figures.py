"""Figures that several dashboards show."""

from panels import Panel, Target
from queries import GENERATING, VARIABLES, level, quantile, rate, ratio, series

from vllm_dhisparse.metrics import (
    FETCHED_ROWS,
    HOST_POOL_BYTES,
    HOST_POOL_PAGES,
    KV_PRESSURE,
    RESIDENCY_BYTES,
    SELECTED_ROWS,
)

ROWS_PER_SECOND = "suffix: rows/s"
SELECTED_GENERATING = rate(SELECTED_ROWS, phase=GENERATING)
FETCH_RATIO = ratio(rate(FETCHED_ROWS, phase=GENERATING), SELECTED_GENERATING)
DEVICE_BYTES = level(RESIDENCY_BYTES)
PRESSURE = f"max by (engine) ({series(KV_PRESSURE)})"
ENGINE = ", ".join(VARIABLES)
HOST_POOL = (
    f"sum by (state) ({series(HOST_POOL_PAGES)}"
    f" / on ({ENGINE}) group_left () sum by ({ENGINE}) ({series(HOST_POOL_PAGES)})"
    f" * on ({ENGINE}) group_left () {series(HOST_POOL_BYTES)})"
)


def fetch_ratio_tile() -> Panel:
    """Return the figure of the paper's abstract."""
    return Panel(
        "Fetch ratio",
        (Target(FETCH_RATIO, "fetched / selected"),),
        "percentunit",
        "Rows fetched from the host / rows selected, while decoding and verifying.",
    )


def optional_share_tile() -> Panel:
    """Return how much of the device's KV memory is spare memory in use."""
    return Panel(
        "Optional residency",
        (Target(ratio(level(RESIDENCY_BYTES, residency_class="optional"), DEVICE_BYTES), "share"),),
        "percentunit",
        "Share of the device's KV memory that holds history because nobody else needs it.",
    )


def pressure_tile() -> Panel:
    """Return the controller's input."""
    return Panel(
        "KV pressure",
        (Target(f"max ({PRESSURE})", "highest of the engines"),),
        "percentunit",
        "Share of the device's KV memory that running and waiting requests require.",
        thresholds=((0.9, "orange"), (0.98, "red")),
    )


def device_memory() -> Panel:
    """Return the device's KV memory by use."""
    return Panel(
        "Device KV memory by use",
        (Target(level(RESIDENCY_BYTES, "residency_class"), "{{residency_class}}"),),
        "bytes",
        "Sums to the capacity. Optional memory is free in vLLM's eyes.",
        is_stacked=True,
    )


def host_pool() -> Panel:
    """Return the host pool by state."""
    return Panel(
        "Host pool by state",
        (Target(HOST_POOL, "{{state}}"),),
        "bytes",
        "Held by running requests, idle (history that a prefix hit may use), free.",
        is_stacked=True,
    )


def latency(title: str, metric: str, description: str) -> Panel:
    """Return quantiles of one of vLLM's latencies."""
    targets = tuple(Target(quantile(q, metric), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99))
    return Panel(title, targets, "s", description)
