"""Selections that several tests use, recorded and synthetic."""

from pathlib import Path

import numpy as np

from vllm_dhisparse.core.traces import Positions, read_trace
from vllm_dhisparse.simulator.locality import EASY, HARD, ORDINARY, positions
from vllm_dhisparse.simulator.workloads import NO_ROW

TRACES = Path(__file__).parents[1] / "data" / "traces"


def recorded_streams(name: str = "novel") -> list[tuple[int, Positions]]:
    """Five layer groups of one model on one text, easy to hard."""
    trace = read_trace(TRACES / f"smollm2-{name}.npz")
    return [trace.stream(group) for group in range(trace.positions.shape[1])]


def synthetic_streams(seed: int, steps: int, k: int) -> list[tuple[int, Positions]]:
    """Six requests of unlike context and locality."""
    kinds = [(3072, EASY), (6144, EASY), (4096, ORDINARY), (8192, ORDINARY), (3072, HARD)]
    kinds.append((7168, HARD))
    return [
        (context, positions(kind, context, steps, k, np.random.default_rng([seed, number])))
        for number, (context, kind) in enumerate(kinds)
    ]


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
