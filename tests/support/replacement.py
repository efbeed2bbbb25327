"""Replacement policies on a workload: pooled CLOCK, exact LRU, and Belady's MIN.

All resolve a step as a whole: rows selected in a step are never replaced in it. Misses
are int64 [steps, requests].
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray
from workloads import Workload

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE

Counts = NDArray[np.int64]


def clock_misses(load: Workload, capacity: int) -> Counts:
    """One CLOCK of ``capacity`` slots for all requests, as ``core.clock``."""
    return _clock(load.rows, load.num_rows, capacity)


def lru_distances(load: Workload) -> Counts:
    """[steps, requests, k]: rows used since a row's last use; num_rows = no use before.

    A cache of exact LRU order holds a row if its capacity is above the distance. Places
    without a row have -1.
    """
    return _distances(load.rows, load.num_rows)


def lru_misses(load: Workload, capacity: int) -> Counts:
    """One exact LRU order for all requests."""
    return (lru_distances(load) >= capacity).sum(axis=2)


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
    owner = np.searchsorted(load.first_row, np.arange(load.num_rows), side="right") - 1
    held = np.zeros(load.num_rows, dtype=bool)
    key = np.full(load.num_rows, steps)
    misses = np.zeros((steps, requests), dtype=np.int64)
    for step in range(steps):
        is_row = load.rows[step] >= 0
        rows = load.rows[step][is_row]
        misses[step] = np.bincount(owner[rows[~held[rows]]], minlength=requests)
        held[rows] = True
        key[rows] = next_use[step][is_row]
        kept = np.flatnonzero(held)
        urgency = np.where(np.isin(kept, rows, assume_unique=True), key[kept] - steps, key[kept])
        kept = kept[np.argsort(urgency, kind="stable")][:capacity]
        held[:] = False
        held[kept] = True
    return misses


@njit(cache=True)
def _clock(all_rows, num_rows, capacity):
    steps, requests, k = all_rows.shape
    slot_of_row = np.full(num_rows, -1, dtype=np.int64)
    row_of_slot = np.full(capacity, -1, dtype=np.int64)
    age = np.zeros(capacity, dtype=np.uint8)
    used = np.full(capacity, -1, dtype=np.int64)
    misses = np.zeros((steps, requests), dtype=np.int64)
    missing = np.empty(requests * k, dtype=np.int64)
    hand, num_empty = 0, capacity
    for step in range(steps):
        num_missing = num_used = 0
        for request in range(requests):
            for row in all_rows[step, request]:
                if row < 0:
                    continue
                slot = slot_of_row[row]
                if slot >= 0:
                    age[slot] = MAX_AGE
                    used[slot] = step
                    num_used += 1
                else:
                    missing[num_missing] = row
                    num_missing += 1
                    misses[step, request] += 1
        entering = min(num_missing, capacity - num_used)
        done = 0
        if num_empty:
            for place in range(capacity):
                slot = (hand + place) % capacity
                if row_of_slot[slot] < 0 and done < entering:
                    row_of_slot[slot] = missing[done]
                    slot_of_row[missing[done]] = slot
                    age[slot] = FRESH_AGE
                    used[slot] = step
                    done += 1
            num_empty -= done
        while done < entering:
            if used[hand] != step:
                if age[hand] > 0:
                    age[hand] -= 1
                else:
                    slot_of_row[row_of_slot[hand]] = -1
                    row_of_slot[hand] = missing[done]
                    slot_of_row[missing[done]] = hand
                    age[hand] = FRESH_AGE
                    used[hand] = step
                    done += 1
            hand = (hand + 1) % capacity
    return misses


@njit(cache=True)
def _distances(all_rows, num_rows):
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
