"""Selections of requests that decode together, recorded and synthetic.

A workload is the rows that each request selects in each step: int32 [steps, requests, k],
ascending, ``NO_ROW`` where fewer than k. Rows of different requests are different numbers.
Rows of the newest tokens are left out, because the tail holds them.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_ROW = -1
TAIL_ROWS = 64
RECORDED = Path(__file__).parents[1] / "data" / "selections.npz"
RECORDED_CONTEXT = 7168

Positions = NDArray[np.int32]


class Workload(NamedTuple):
    """``rows``: int32 [steps, requests, k]; ``context``: [requests], tokens before step 0;
    ``first_row``: [requests], row of each request's position 0; ``num_rows``: all rows."""

    rows: Positions
    context: NDArray[np.int64]
    first_row: NDArray[np.int64]
    num_rows: int


class Locality(NamedTuple):
    """Kinetics of a request's scores; see ``positions``."""

    fast: tuple[float, float]  # size, steps
    slow: tuple[float, float]
    white: float
    recency: float
    recent_tokens: float
    span_share: float
    span_tokens: float
    jump_chance: float
    jump_steps: float


# Fitted to recorded selections: of all layers, of one that selects much the same rows from
# step to step, and of one that does not.
ORDINARY = Locality((0.068, 2.24), (1.194, 22.0), 0.564, 1.115, 5.61, 0.541, 7.49, 0.087, 46.3)
EASY = Locality((0.253, 1.59), (0.672, 17.7), 0.171, 1.047, 6.79, 0.216, 6.24, 0.121, 65.0)
HARD = Locality((0.508, 1.78), (0.603, 9.29), 0.606, 0.836, 4.45, 0.744, 9.72, 0.088, 12.8)


def workload(streams: list[tuple[int, Positions]]) -> Workload:
    """Join streams of (context, positions [steps, up to k]) into one workload."""
    context = np.array([start for start, _ in streams], dtype=np.int64)
    steps = min(len(positions) for _, positions in streams)
    first_row = np.concatenate([[0], np.cumsum(context + steps)])
    k = max(positions.shape[1] for _, positions in streams)
    rows = np.full((steps, len(streams), k), NO_ROW, dtype=np.int32)
    for request, (_, positions) in enumerate(streams):
        rows[:, request, : positions.shape[1]] = positions[:steps]
    in_tail = rows >= (context + np.arange(steps)[:, None] + 1 - TAIL_ROWS)[:, :, None]
    rows = np.where(in_tail | (rows < 0), NO_ROW, rows + first_row[:-1, None])
    return Workload(
        np.sort(rows, axis=-1).astype(np.int32), context, first_row[:-1], int(first_row[-1])
    )


def recorded_streams() -> list[tuple[int, Positions]]:
    """Five layer groups of one model on one text, easy to hard."""
    with np.load(RECORDED) as file:
        positions = file["positions"].astype(np.int32)
    return [(RECORDED_CONTEXT, positions[:, stream]) for stream in range(positions.shape[1])]


def synthetic_streams(seed: int, steps: int, k: int) -> list[tuple[int, Positions]]:
    """Six requests of unlike context and locality."""
    kinds = [(3072, EASY), (6144, EASY), (4096, ORDINARY), (8192, ORDINARY), (3072, HARD)]
    kinds.append((7168, HARD))
    return [
        (context, positions(kind, context, steps, k, np.random.default_rng([seed, number])))
        for number, (context, kind) in enumerate(kinds)
    ]


def positions(
    kind: Locality, context: int, steps: int, k: int, random: np.random.Generator
) -> Positions:
    """Return the k tokens of highest score in each step; the context grows by one a step.

    A score is a fixed part, two processes that forget it over a few and over many steps,
    noise, and recency. Neighbours in a span share a part of each. Now and then the subject
    changes, and the processes move on by many steps at once.
    """
    tokens = context + steps
    spans = np.cumsum(random.random(tokens) < 1 / kind.span_tokens)
    own, shared = np.sqrt(1 - kind.span_share), np.sqrt(kind.span_share)

    def draw(kind_of: str = "standard_normal") -> NDArray[np.float32]:
        of_span = getattr(random, kind_of)(size=spans[-1] + 1)
        return (shared * of_span[spans] + own * getattr(random, kind_of)(size=tokens)).astype("f4")

    fixed = draw("laplace") / np.sqrt(2)
    fixed[0] = np.inf  # a sink
    processes = [draw(), draw()]
    selected = np.empty((steps, k), dtype=np.int32)
    for step in range(steps):
        length = context + step + 1
        passed = kind.jump_steps if random.random() < kind.jump_chance else 1.0
        score = fixed + kind.white * draw()
        for number, (size, memory) in enumerate((kind.fast, kind.slow)):
            kept = np.exp(-passed / memory)
            processes[number] = kept * processes[number] + np.sqrt(1 - kept**2) * draw()
            score += size * processes[number]
        distance = np.arange(length - 1, -1, -1)
        score = score[:length] - kind.recency * np.log1p(distance / kind.recent_tokens)
        selected[step] = np.argpartition(score, length - k)[length - k :]
    return selected


def without_locality(context: int, steps: int, k: int, seed: int) -> tuple[int, Positions]:
    """A request that selects at random: nothing it fetched is worth keeping."""
    random = np.random.default_rng(seed)
    rows = np.stack([random.choice(context, k, replace=False) for _ in range(steps)])
    return context, rows.astype(np.int32)


def scan(context: int, steps: int, k: int, start: int, end: int) -> tuple[int, Positions]:
    """A request that reads its context once, front to back, between two steps."""
    rows = np.full((steps, k), NO_ROW, dtype=np.int32)
    rows[start:end] = np.arange((end - start) * k).reshape(-1, k) % context
    return context, rows
