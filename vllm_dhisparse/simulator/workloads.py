"""Selections of requests that decode together, as rows.

A workload is the rows that each request selects in each step: int32 [steps, requests, k],
ascending, ``NO_ROW`` where fewer than k. Rows of different requests are different numbers.
Rows of the newest tokens are left out, because the tail holds them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.traces import Positions

NO_ROW = -1


class Workload(NamedTuple):
    """``rows``: int32 [steps, requests, k]; ``context``: [requests], tokens before step 0;
    ``first_row``: [requests], row of each request's position 0; ``num_rows``: all rows."""

    rows: Positions
    context: NDArray[np.int64]
    first_row: NDArray[np.int64]
    num_rows: int


def workload(streams: list[tuple[int, Positions]], tail_rows: int = UNIT_ROWS) -> Workload:
    """Join streams of (context, positions [steps, up to k]) into one workload.

    Args:
        streams: one for each request; the shortest gives the number of steps.
        tail_rows: newest rows, the step's own among them, that the tail holds; at least 1.

    """
    context = np.array([start for start, _ in streams], dtype=np.int64)
    steps = min(len(positions) for _, positions in streams)
    first_row = np.concatenate([[0], np.cumsum(context + steps)])
    k = max(positions.shape[1] for _, positions in streams)
    rows = np.full((steps, len(streams), k), NO_ROW, dtype=np.int32)
    for request, (_, positions) in enumerate(streams):
        rows[:, request, : positions.shape[1]] = positions[:steps]
    in_tail = rows >= (context + np.arange(steps)[:, None] + 1 - tail_rows)[:, :, None]
    rows = np.where(in_tail | (rows < 0), NO_ROW, rows + first_row[:-1, None]).astype(np.int32)
    return Workload(np.sort(rows, axis=-1), context, first_row[:-1], int(first_row[-1]))


def one(load: Workload, request: int) -> Workload:
    """The workload of one request."""
    rows, first = load.rows[:, request : request + 1], load.first_row[request]
    rows = np.where(rows == NO_ROW, NO_ROW, rows - first).astype(np.int32)
    return Workload(rows, load.context[request : request + 1], np.zeros(1, np.int64), longest(load))


def longest(load: Workload) -> int:
    """Rows of the longest request at the last step."""
    return int(load.context.max() + load.rows.shape[0])
