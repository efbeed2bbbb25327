"""Miss shares of standard caches on selections, to compare with what was published.

Published for GLM-5.1 on LongBench v2 with k = 2,048 (HiSparse paper): see ``PUBLISHED``.
The row of the query's own token is written on the device, so it enters the cache without
a miss; all rows of a selection count, also those of the newest tokens.
"""

from typing import NamedTuple

import numpy as np

from vllm_dhisparse.core.traces import Positions
from vllm_dhisparse.simulator.replacement import (
    Counts,
    clock_misses,
    fifo_misses,
    lru_distances,
    lru_misses,
    min_misses,
    random_misses,
)
from vllm_dhisparse.simulator.workloads import Workload, one, workload

WARM_STEPS = 256
PUBLISHED = {
    "LRU k": 0.30,
    "LRU 2k": 0.134,
    "LRU 4k": 0.067,
    "FIFO 2k": 0.172,
    "random 2k": 0.161,
    "MIN 2k": 0.082,
}


def written_workload(streams: list[tuple[int, Positions]]) -> Workload:
    """Return the workload in which each step also uses the row of its own token."""
    joined = []
    for context, positions in streams:
        own = context + np.arange(len(positions))[:, None]
        others = np.where(positions == own, -1, positions)
        joined.append((context, np.concatenate([others, own], axis=1).astype(np.int32)))
    return workload(joined, tail_rows=0)


def miss_shares(streams: list[tuple[int, Positions]]) -> dict[str, float]:
    """Return the miss share of each cache of ``PUBLISHED``, mean of the streams, and CLOCK's."""
    k = streams[0][1].shape[1]
    found: dict[str, list[float]] = {}
    for stream in streams:
        load = written_workload([stream])
        distances = lru_distances(load)
        sizes = {"LRU k": k, "LRU 2k": 2 * k, "LRU 4k": 4 * k, "LRU 8k": 8 * k}
        misses = {name: _share((distances >= rows).sum(axis=2), k) for name, rows in sizes.items()}
        misses["FIFO 2k"] = _share(fifo_misses(load, 2 * k), k)
        misses["random 2k"] = _share(random_misses(load, 2 * k), k)
        misses["MIN 2k"] = _share(min_misses(load, 2 * k), k)
        misses["CLOCK 2k"] = _share(clock_misses(load, 2 * k), k)
        for name, value in misses.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


class Pooled(NamedTuple):
    """Miss shares with the same rows in all: ``equal`` in each index group, or ``one`` cache."""

    equal: float
    one: float


def pooled_over_groups(streams: list[tuple[int, Positions]], rows_per_group: int) -> Pooled:
    """Compare equal rows in each index group with one cache for all, exact LRU both."""
    k = streams[0][1].shape[1]
    load = written_workload(streams)
    equal = [
        _share(lru_misses(one(load, group), rows_per_group), k) for group in range(len(streams))
    ]
    pooled = lru_misses(load, rows_per_group * len(streams))
    return Pooled(float(np.mean(equal)), _share(pooled, k))


def _share(misses: Counts, k: int) -> float:
    late = misses[WARM_STEPS:]
    return float((late - 1).mean() / k)  # without the own row, which is never there before
