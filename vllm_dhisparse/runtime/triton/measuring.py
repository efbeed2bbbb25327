"""What a step took and used, noted on the device: a graph repeats it, and the host reads later."""

import torch

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.kernels import shapes, timing, usage
from vllm_dhisparse.runtime.plan import Resolution
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables

_AGES = MAX_AGE + 1
_CLOCK = "none" if shapes.INTERPRETED else "amd" if torch.version.hip else "nvidia"


def start_clock(started: torch.Tensor) -> None:
    """Note the time in [1] int64."""
    timing.start_clock[(1,)](started, CLOCK=_CLOCK, num_warps=1)


def stop_clock(started: torch.Tensor, generates: torch.Tensor, totals: torch.Tensor) -> None:
    """Add the time since ``start_clock`` to a phase.

    Args:
        started: from ``start_clock``.
        generates: [1] bool - whether the step is counted as generation or as prefill.
        totals: [phases, 2] int64 - nanoseconds, and how often they were added to.

    """
    assert totals.is_contiguous()
    timing.stop_clock[(1,)](started, generates.view(torch.uint8), totals, CLOCK=_CLOCK, num_warps=1)


def note_ages(tables: Tables, index_group: int, before: torch.Tensor, counts: torch.Tensor) -> None:
    """Keep the ages of rows in the cache before ``resolve`` changes them.

    Args:
        tables: the worker's.
        index_group: which map.
        before: out [num_slots] uint8.
        counts: in, out [ages] int64 - rows in the cache by age.

    """
    _, row_of_slot, age, _ = tables.group(index_group)
    num_slots = row_of_slot.numel()
    if num_slots:
        usage.note_ages[(-(-num_slots // shapes.TILE),)](
            row_of_slot,
            tables.unit_state,
            age,
            before,
            counts,
            num_slots,
            UNIT_ROWS=UNIT_ROWS,
            REQUIRED=int(UnitState.REQUIRED),
            AGES=_AGES,
            BLOCK=shapes.TILE,
        )


def count_hits(resolution: Resolution, before: torch.Tensor, counts: torch.Tensor) -> None:
    """Count by age the rows that a step found in the cache, once however many passes read them.

    Args:
        resolution: of the step.
        before: in, out, from ``note_ages``.
        counts: in, out [ages] int64.

    """
    for plan in resolution.plans:
        capacity = plan.union.numel()
        if capacity and before.numel():
            usage.count_hits[(-(-capacity // shapes.TILE),)](
                plan.slot,
                plan.fetch.view(torch.uint8),
                plan.union,
                before,
                counts,
                capacity,
                AGES=_AGES,
                BLOCK=shapes.TILE,
            )
