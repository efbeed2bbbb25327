"""Replacement policies on a workload: pooled CLOCK, exact LRU, FIFO, random, Belady's MIN.

All resolve a step as a whole: rows selected in a step are never replaced in it. Misses
are int64 [steps, requests].
"""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.commands import UNIT_ROWS, UnitState
from vllm_dhisparse.core.traces import Positions
from vllm_dhisparse.simulator.native import compiled
from vllm_dhisparse.simulator.row_cache import RowCache
from vllm_dhisparse.simulator.workloads import Workload

Counts = NDArray[np.int64]


def clock_misses(load: Workload, capacity: int) -> Counts:
    """One CLOCK of ``capacity`` slots for all requests: the row cache of the package."""
    cache = RowCache(load.num_rows, -(-capacity // UNIT_ROWS))
    cache.state[:capacity] = UnitState.REQUIRED
    cache.mark_empty()
    return np.array([_by_request(load, cache.resolve(rows).fetched) for rows in load.rows])


def fifo_misses(load: Workload, capacity: int) -> Counts:
    """Rows leave in the order in which they were fetched."""
    return _ordered_misses(load, capacity, np.random.default_rng(0), is_random=False)


def random_misses(load: Workload, capacity: int, seed: int = 0) -> Counts:
    """Any row outside the step's selections may leave."""
    return _ordered_misses(load, capacity, np.random.default_rng(seed), is_random=True)


def _ordered_misses(
    load: Workload, capacity: int, random: np.random.Generator, is_random: bool
) -> Counts:
    entered = np.full(load.num_rows, -1, dtype=np.int64)  # -1 = not held
    misses = np.zeros(load.rows.shape[:2], dtype=np.int64)
    time = 0
    for step in range(len(load.rows)):
        rows = load.rows[step][load.rows[step] >= 0]
        missing = rows[entered[rows] < 0]
        misses[step] = _by_request(load, missing)
        entered[missing] = time + np.arange(missing.size)
        time += missing.size
        kept = np.flatnonzero(entered >= 0)
        over = kept.size - capacity
        if over > 0:
            others = np.setdiff1d(kept, rows, assume_unique=True)
            key = random.random(others.size) if is_random else entered[others]
            entered[others[np.argsort(key)[:over]]] = -1
    return misses


def _by_request(load: Workload, rows: Positions) -> Counts:
    owner = np.searchsorted(load.first_row, rows, side="right") - 1
    return np.bincount(owner, minlength=load.first_row.size)


def lru_distances(load: Workload) -> Counts:
    """[steps, requests, k]: rows used since a row's last use; num_rows = no use before.

    A cache of exact LRU order holds a row if its capacity is above the distance. Places
    without a row have -1.
    """
    return _distances(load.rows, load.num_rows)


def lru_misses(load: Workload, capacity: int) -> Counts:
    """One exact LRU order for all requests."""
    return np.asarray((lru_distances(load) >= capacity).sum(axis=2))


def min_misses(load: Workload, capacity: int) -> Counts:
    """Belady's MIN: beside the rows of the step, keep those of nearest next use.

    No policy that caches what it fetches misses less.
    """
    steps, requests, _ = load.rows.shape
    next_use = np.empty(load.rows.shape, dtype=np.int64)
    upcoming = np.full(load.num_rows, steps)
    for step in range(steps - 1, -1, -1):
        rows = load.rows[step]
        next_use[step] = upcoming[rows]
        upcoming[rows[rows >= 0]] = step
    held = np.zeros(load.num_rows, dtype=bool)
    key = np.full(load.num_rows, steps)
    misses = np.zeros((steps, requests), dtype=np.int64)
    for step in range(steps):
        is_row = load.rows[step] >= 0
        rows = load.rows[step][is_row]
        misses[step] = _by_request(load, rows[~held[rows]])
        held[rows] = True
        key[rows] = next_use[step][is_row]
        kept = np.flatnonzero(held)
        urgency = np.where(np.isin(kept, rows, assume_unique=True), key[kept] - steps, key[kept])
        kept = kept[np.argsort(urgency, kind="stable")][:capacity]
        held[:] = False
        held[kept] = True
    return misses


@compiled
def _distances(all_rows: Positions, num_rows: int) -> Counts:
    steps, requests, k = all_rows.shape
    size = steps * requests * k + 1
    tree = np.zeros(size + 1, dtype=np.int64)  # of uses in order of time, the last of each row
    last = np.zeros(num_rows, dtype=np.int64)
    distances = np.full(all_rows.shape, -1, dtype=np.int64)
    time, live = 0, 0
    for step in range(steps):
        for request in range(requests):
            for rank in range(k):
                row = all_rows[step, request, rank]
                if row < 0:
                    continue
                if not last[row]:
                    distances[step, request, rank] = num_rows
                    continue
                newer, place = live, last[row]
                while place:
                    newer -= tree[place]
                    place &= place - 1
                distances[step, request, rank] = newer
        for request in range(requests):
            for row in all_rows[step, request]:
                if row < 0:
                    continue
                place = last[row]
                live += place == 0
                while place and place <= size:
                    tree[place] -= 1
                    place += place & -place
                time += 1
                last[row] = place = time
                while place <= size:
                    tree[place] += 1
                    place += place & -place
    return distances
