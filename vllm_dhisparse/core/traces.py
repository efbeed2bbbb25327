"""Selections of one request as a file: recorded from a model, or generated.

A trace is a numpy ``.npz`` file, compressed or not, without pickled objects:

    positions   integer [steps, groups, queries, top_k]: token positions that each query of a
                step selected in each index group, in any order; -1 = unused place
    context     integer [steps]: position of the step's first query, = tokens before it
    accepted    integer [steps]: tokens that the step added to the sequence, 1 without drafts;
                the queries from the ``accepted``-th on are of drafts that were rejected
    meta        JSON text: "model" and "source" say what was recorded, other keys are free

The query ``j`` of a step is at position ``context + j`` and selects positions up to its
own. Recorders write whatever integer type is smallest.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_POSITION = -1

Positions = NDArray[np.int32]
Counts = NDArray[np.int64]


class Trace(NamedTuple):
    """``positions``: int32 [steps, groups, queries, top_k]; ``context``, ``accepted``: int64
    [steps]; ``meta``: what was recorded."""

    positions: Positions
    context: Counts
    accepted: Counts
    meta: Mapping[str, Any]

    @property
    def top_k(self) -> int:
        """Rows that a query selects at most."""
        return int(self.positions.shape[3])

    def stream(self, group: int) -> tuple[int, Positions]:
        """Return the first context, and what the first query of each step selects.

        The second is int32 [steps, top_k]: decoding without drafts, in one index group.
        """
        return int(self.context[0]), self.positions[:, group, 0]


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, in the smallest type that holds its positions."""
    check_trace(trace)
    most = int(trace.positions.max(initial=0))
    has_unused = bool((trace.positions == NO_POSITION).any())
    kinds = (np.int16, np.int32) if has_unused else (np.uint16, np.int32)
    kind = kinds[0] if most <= np.iinfo(kinds[0]).max else kinds[1]
    np.savez_compressed(
        path,
        positions=trace.positions.astype(kind, order="K"),
        context=trace.context,
        accepted=trace.accepted,
        meta=json.dumps(dict(trace.meta)),
    )


def read_trace(path: Path) -> Trace:
    """Read and check a trace.

    Raises:
        ValueError: the file is not a trace; the message names the file and what is wrong.

    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"positions", "context", "accepted", "meta"} - set(file.files)
            if missing:
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            trace = Trace(
                file["positions"].astype(np.int32),
                file["context"].astype(np.int64),
                file["accepted"].astype(np.int64),
                json.loads(str(file["meta"])),
            )
        check_trace(trace)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{path} is not a trace of selections: {error}") from error
    return trace


def check_trace(trace: Trace) -> None:
    """Refuse a trace whose arrays do not fit together.

    Raises:
        ValueError: says what does not fit.

    """
    positions = trace.positions
    if positions.ndim != 4 or not positions.size:
        raise ValueError(f"positions must have 4 dimensions and a step, got {positions.shape}")
    steps, _, queries, _ = positions.shape
    for name, values in (("context", trace.context), ("accepted", trace.accepted)):
        if values.shape != (steps,):
            raise ValueError(f"{name} must be [{steps}], got {list(values.shape)}")
    if (trace.accepted < 1).any() or (trace.accepted > queries).any():
        raise ValueError(f"accepted must be from 1 to {queries}")
    own = trace.context[:, None] + np.arange(queries)
    if positions.min() < NO_POSITION or (positions.max(axis=(1, 3)) > own).any():
        raise ValueError("a query selects a position after its own, or below -1")
