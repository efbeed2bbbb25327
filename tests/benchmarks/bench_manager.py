"""What a scheduler step costs with our managers, over vLLM's stock managers.

Ours: managers, ledger, pages, controller and the connector's message to the workers. Stock:
vLLM's managers for the same requests, with all of their history on the device.
"""

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles

from harness import Figure, Sizes, benchmark, figure
from manager_load import Ours, Shape, Stock

GROUPS = ((4, 1), (20, 5))
"""Latent and indexer groups: GLM-5.3, and a model that a drafter's layers split finely."""


def microseconds(function: Callable[[], object]) -> float:
    """Thread time, which leaves out what other programs on the machine take."""
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1e3


def steps_in_turn(ours: Ours, stock: Stock, count: int) -> list[tuple[float, float]]:
    """Time ``count`` steps of both, in turn, so that both see the same noise."""
    times = []
    for _ in range(count):
        times.append((microseconds(ours.schedule), microseconds(stock.schedule)))
        ours.update()
        stock.update()
    return times


def compared(name: str, times: list[tuple[float, float]]) -> Iterator[Figure]:
    own, baseline = (median(column) for column in zip(*times, strict=True))
    over = [ours - stock for ours, stock in times]
    yield figure(f"{name}: step against stock managers", own, "us", baseline)
    yield figure(f"{name}: over stock managers, median", median(over), "us")
    yield figure(f"{name}: over stock managers, p95", quantiles(over, n=20)[-1], "us")


def measure(shape: Shape, num_steps: int) -> Iterator[Figure]:
    ours, stock = Ours(shape), Stock(shape)
    # As vLLM's engine does, or the collector walks the blocks now and then.
    gc.collect()
    gc.freeze()
    groups = f"{shape.latent_groups} + {shape.indexer_groups} groups"
    title = f"128 x {shape.context_tokens // 1000}K, {groups}"
    ledger = ours.state.ledger
    steps_in_turn(ours, stock, 10)
    yield from compared(f"{title}, full device", steps_in_turn(ours, stock, num_steps))
    # Half of the history leaves the device, and comes back in part by misses.
    ledger.optional.give_up(ledger.levels().optional_units // 2)
    ours.fetched_rows = 1024
    steps_in_turn(ours, stock, 20)
    before = ledger.levels().optional_units
    yield from compared(f"{title}, adopting", steps_in_turn(ours, stock, num_steps))
    adopted = (ledger.levels().optional_units - before) / num_steps
    yield figure(f"{title}, adopting: units gained a step", adopted, "units")
    gc.unfreeze()


@benchmark("managers")
def managers(sizes: Sizes) -> Iterator[Figure]:
    """About two minutes and 6 GB at the full sizes."""
    for latent_groups, indexer_groups in GROUPS:
        for context in sizes.scheduled_contexts:
            shape = Shape(latent_groups, indexer_groups, sizes.requests, context)
            yield from measure(shape, 12 * sizes.least_repeats)
