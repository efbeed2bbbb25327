"""Static splits of one budget over requests, from their exact LRU miss curves."""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.simulator.replacement import lru_distances
from vllm_dhisparse.simulator.workloads import NO_ROW, Workload, longest, one

Curves = NDArray[np.float64]


def miss_curves(load: Workload, warm_steps: int) -> Curves:
    """[requests, rows + 1]: misses of each request alone with an LRU cache of so many rows."""
    curves = []
    for request in range(load.rows.shape[1]):
        distances = lru_distances(one(load, request))[warm_steps:]
        counts = np.bincount(
            np.minimum(distances[distances >= 0], longest(load)), minlength=longest(load) + 1
        )
        curves.append(counts.sum() - np.concatenate([[0], np.cumsum(counts[:-1])]))
    return np.array(curves, dtype=np.float64)


def equal(curves: Curves, budget: int) -> float:
    """Misses when each request has the same rows."""
    return _at(curves, np.full(len(curves), budget / len(curves)))


def proportional(curves: Curves, budget: int, context: NDArray[np.int64]) -> float:
    """Misses when rows go by context."""
    return _at(curves, budget * context / context.sum())


def optimum(curves: Curves, budget: int) -> float:
    """Misses of the best static split, seen from the end; a lower bound.

    On the convex hulls of the curves the best split takes the steepest pieces of all
    requests first. The hull is nowhere above the curve.
    """
    steps = np.concatenate([np.diff(_hull(curve)) for curve in curves])
    return float(curves[:, 0].sum() + np.sort(steps)[:budget].sum())


def page_tail(load: Workload, budget: int, hot_rows: int, warm_steps: int) -> int:
    """Misses when each share holds the newest tokens, beside an LRU cache of ``hot_rows``."""
    requests = load.rows.shape[1]
    hot = min(hot_rows, budget // requests)
    resident = budget // requests - hot
    now = load.first_row + load.context + np.arange(load.rows.shape[0])[:, None]
    rows = np.where(load.rows >= (now - resident)[:, :, None], NO_ROW, load.rows)
    old = load._replace(rows=np.sort(rows, axis=-1))
    return sum(
        int((lru_distances(one(old, request))[warm_steps:] >= hot).sum())
        for request in range(requests)
    )


def _at(curves: Curves, rows: NDArray[np.float64]) -> float:
    places = np.arange(curves.shape[1])
    return float(sum(np.interp(r, places, curve) for r, curve in zip(rows, curves, strict=True)))


def _hull(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    corners = [0]
    for place in range(1, len(curve)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (curve[b] - curve[a]) * (place - a) < (curve[place] - curve[a]) * (b - a):
                break
            corners.pop()
        corners.append(place)
    return np.asarray(np.interp(np.arange(len(curve)), corners, curve[corners]))
