"""One pooled CLOCK against what else could be done with the same rows.

``pytest -s`` prints the tables. Figures are shares of the selected rows that are outside
the tail, after a warm-up.
"""

from functools import cache

import numpy as np
import pytest
from clock_state import Clock
from workloads import recorded_streams, scan, synthetic_streams, without_locality

from vllm_dhisparse.simulator import partitions
from vllm_dhisparse.simulator.replacement import (
    clock_misses,
    lru_distances,
    lru_misses,
    min_misses,
)
from vllm_dhisparse.simulator.workloads import one, workload

WARM_STEPS = 256
LOADS = {
    "recorded": (recorded_streams, 160),
    "synthetic": (lambda: synthetic_streams(seed=1, steps=700, k=128), 128),
}
BUDGETS = (1, 2, 4, 8, 16)  # rows per request, in units of k
LRU_LIMITS = {("synthetic", 4): 2.15}
"""LRU misses at most twice as much as MIN, but for one budget: there 2.13 times (CLOCK 1.96)."""


@cache
def streams_of(name):
    return LOADS[name][0]()


@cache
def load_of(name):
    return workload(streams_of(name))


@cache
def curves_of(name):
    return partitions.miss_curves(load_of(name), WARM_STEPS)


@pytest.fixture(params=LOADS)
def name(request):
    return request.param


@pytest.fixture(params=BUDGETS)
def share(request, name):
    """Rows per request."""
    return request.param * LOADS[name][1]


def late(misses, requests=None):
    return int(misses[WARM_STEPS:, :requests].sum())


def private_clocks(load, share):
    """Misses of each request with a cache of its own."""
    singles = [one(load, request) for request in range(load.rows.shape[1])]
    return [late(clock_misses(single, share)) for single in singles]


def small_load():
    random = np.random.default_rng(3)
    hot = [random.choice(120, (60, 12), p=p) for p in random.dirichlet(np.full(120, 0.1), 2)]
    unique = [np.array([[*{*row}] + [-1] * (12 - len({*row})) for row in rows]) for rows in hot]
    return workload([(200, rows) for rows in unique])


def test_the_fast_clock_is_the_clock_of_the_core():
    load, capacity = small_load(), 40
    clock = Clock(capacity)
    row_of_slot = np.full(capacity, -1)
    misses = []
    for step in load.rows:
        union = step[step >= 0]
        missing = union[~np.isin(union, row_of_slot)]
        in_use = np.isin(row_of_slot, union)
        clock.hit(np.flatnonzero(in_use))
        empty = row_of_slot < 0
        taken = clock.take(empty, ~empty & ~in_use, missing.size)
        row_of_slot[taken] = missing[: taken.size]
        misses.append([(missing < load.first_row[1]).sum(), (missing >= load.first_row[1]).sum()])
    assert np.sum(misses) > 100
    assert clock_misses(load, capacity).tolist() == np.array(misses).tolist()


def test_lru_distances_are_places_in_the_order_of_use():
    load = small_load()
    order = []
    for step, distances in zip(load.rows, lru_distances(load), strict=True):
        used = step[step >= 0].tolist()
        expected = [order.index(row) if row in order else load.num_rows for row in used]
        assert distances[step >= 0].tolist() == expected
        order = used[::-1] + [row for row in order if row not in used]


def test_min_is_below_every_other_policy():
    load = small_load()
    for capacity in (24, 40, 80, 120):
        least = min_misses(load, capacity).sum()
        assert least <= clock_misses(load, capacity).sum()
        assert least <= lru_misses(load, capacity).sum()


def test_one_clock_is_close_to_the_best_split_and_to_min(name, share):
    load, curves, k = load_of(name), curves_of(name), LOADS[name][1]
    budget = share * load.rows.shape[1]
    best = partitions.optimum(curves, budget)
    clock = late(clock_misses(load, budget))
    lru = late(lru_misses(load, budget))
    least = late(min_misses(load, budget))
    table = {
        "one CLOCK": clock,
        "one LRU": lru,
        "best split": best,
        "equal split": partitions.equal(curves, budget),
        "by context": partitions.proportional(curves, budget, load.context),
        "private CLOCKs": sum(private_clocks(load, share)),
        "newest pages": partitions.page_tail(load, budget, 2 * k, WARM_STEPS),
        "MIN": least,
    }
    selected = (load.rows[WARM_STEPS:] >= 0).sum()
    figures = ", ".join(f"{policy} {misses / selected:.2%}" for policy, misses in table.items())
    ratios = f"CLOCK / best split {clock / best:.3f}, CLOCK / MIN {clock / least:.2f}"
    print(f"\n{name}, {share // k} k: {figures}; {ratios}, LRU / MIN {lru / least:.2f}")
    assert clock <= 1.08 * best
    assert clock <= 2 * least
    assert lru <= LRU_LIMITS.get((name, share // k), 2) * least
    assert clock <= 1.01 * min(table["equal split"], table["private CLOCKs"])


def test_harm_by_a_request_without_locality_is_bounded(name, share):
    streams, k = streams_of(name), LOADS[name][1]
    others = len(streams)
    load = workload([*streams, without_locality(7168, len(streams[0][1]), k, seed=5)])
    budget = share * (others + 1)
    selected = (load.rows[WARM_STEPS:, :others] >= 0).sum()
    alone = sum(private_clocks(load, share)[:others])
    clock = late(clock_misses(load, budget), others)
    lru = late(lru_misses(load, budget), others)
    print(
        f"\n{name}, {share // k} k: the others miss {clock / selected:.2%} in one CLOCK,"
        f" {lru / selected:.2%} in one LRU, {alone / selected:.2%} with private caches"
    )
    assert clock <= lru
    assert clock <= 1.8 * alone
    assert clock - alone <= 0.035 * selected


def test_a_scan_by_a_decoding_request_is_soon_forgotten(name, share):
    """Its rows enter one selection a step; those of a prefill do not enter at all."""
    streams, k = streams_of(name), LOADS[name][1]
    others, start, end = len(streams), 400, 440
    budget = share * others
    calm = load_of(name)
    load = workload([*streams, scan(8192, len(streams[0][1]), k, start, end)])

    def hit_rates(misses):
        windows = [slice(start, end), slice(end, end + 40), slice(end + 40, end + 140)]
        selected = [(calm.rows[window] >= 0).sum() for window in windows]
        return [
            1 - misses[w, :others].sum() / rows for w, rows in zip(windows, selected, strict=True)
        ]

    before, after = hit_rates(clock_misses(calm, budget)), hit_rates(clock_misses(load, budget))
    changes = ", ".join(f"{b:.1%} -> {a:.1%}" for b, a in zip(before, after, strict=True))
    print(f"\n{name}, {share // k} k: hits during the scan, 40 steps after, later: {changes}")
    assert after[0] >= before[0] - 0.07
    assert after[1] >= before[1] - 0.04
    assert after[2] >= before[2] - 0.01
