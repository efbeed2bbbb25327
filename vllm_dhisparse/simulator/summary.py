"""A run, or a part of it, in a few figures."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.simulator.engine import Step


@dataclass(frozen=True)
class Summary:
    """Figures of one GPU over some steps.

    Attributes:
        steps: number of them.
        running, waiting: requests, mean.
        output_tokens_per_s: of the GPU.
        tpot_p50_ms, tpot_p99_ms: time for each output token of a request, over steps.
        fetch_ratio: fetched rows over selected rows, misses shared by the queries of a step.
        miss_ratio: selected rows that were not on the device, over selected rows.
        link_gb_per_s: over the host link, restored rows included.
        device_ratio: blocks by use, shares of the pool.
        preempted: requests.
        reclaims: steps in which the pool took optional units back.
        step_ms: mean parts of the step.

    """

    steps: int
    running: float
    waiting: float
    output_tokens_per_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    fetch_ratio: float
    miss_ratio: float
    link_gb_per_s: float
    device_ratio: dict[str, float]
    preempted: int
    reclaims: int
    step_ms: dict[str, float]

    @property
    def tpot_ms(self) -> float:
        """Mean time for each output token of a request."""
        return 1e3 * self.running / max(self.output_tokens_per_s, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain numbers."""
        return asdict(self)


def summarize(steps: Sequence[Step], row_bytes: float) -> Summary:
    """Return the figures of some steps.

    Args:
        steps: at least one.
        row_bytes: bytes of one row of `Step` in all layers.

    """
    assert steps
    total_ms = np.array([step.parts.total for step in steps])
    tokens = np.array([step.tokens for step in steps], dtype=float)
    running = np.array([step.running for step in steps], dtype=float)
    selected = sum((step.selected for step in steps), np.zeros(len(UnitState)))
    fetched = sum(step.fetched for step in steps)
    moved = fetched + sum(step.restored for step in steps)
    busy = tokens > 0
    each = total_ms[busy] * running[busy] / tokens[busy]
    p50, p99 = np.percentile(each, [50, 99]) if each.size else (0.0, 0.0)
    seconds = float(total_ms.sum() / 1e3)
    blocks = np.mean([step.levels for step in steps], axis=0)
    rows = max(float(selected.sum()), 1e-9)
    return Summary(
        steps=len(steps),
        running=float(running.mean()),
        waiting=float(np.mean([step.waiting for step in steps])),
        output_tokens_per_s=float(tokens.sum()) / seconds,
        tpot_p50_ms=float(p50),
        tpot_p99_ms=float(p99),
        fetch_ratio=fetched / rows,
        miss_ratio=float(selected[UnitState.DEAD]) / rows,
        link_gb_per_s=moved * row_bytes / seconds / 1e9,
        device_ratio={
            name: float(value / blocks.sum())
            for name, value in zip(steps[0].levels._fields, blocks, strict=True)
        },
        preempted=sum(step.preempted for step in steps),
        reclaims=sum(step.state == "reclaim" for step in steps),
        step_ms={
            name: float(np.mean([getattr(step.parts, name) for step in steps]))
            for name in steps[0].parts._fields
        },
    )
