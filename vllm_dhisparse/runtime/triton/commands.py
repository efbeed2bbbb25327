"""Applying a step's commands: one upload, and a few launches in the commands' order.

Not part of a captured graph: how much there is to do depends on the step.
"""

from itertools import accumulate, groupby

import torch

from vllm_dhisparse.core.clock import FRESH_AGE
from vllm_dhisparse.core.commands import (
    Command,
    PageBound,
    PageDropped,
    SpanRestored,
    StepCommands,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)
from vllm_dhisparse.kernels import commands as kernels
from vllm_dhisparse.kernels import shapes
from vllm_dhisparse.runtime.apply import begin_step
from vllm_dhisparse.runtime.restore import RestoredSpans
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables

_Ints = list[int]


def apply(commands: StepCommands, tables: Tables) -> RestoredSpans:
    begin_step(commands, tables)
    device, groups = tables.errors.device, tables.sizes.index_groups
    encoded, blocks = _encode(commands.commands, tables.sizes.latent_groups)
    spans = [command for command in commands.commands if isinstance(command, SpanRestored)]
    units = [span.unit for span in spans]
    rows = [span.page * tables.sizes.page_rows + span.first_row for span in spans]
    runs = [
        (is_span, [entry for command in run for entry in _ranges(command, tables)], len(run))
        for is_span, group in groupby(commands.commands, lambda c: isinstance(c, SpanRestored))
        for run in [list(group)]
    ]
    forgotten = [number for _, ranges, _ in runs for number in ranges]
    code, added, unit_list, row_list, range_list = _upload(
        [encoded, blocks, units, rows, forgotten], device
    )
    absent = torch.empty(len(spans), groups, UNIT_ROWS, dtype=torch.bool, device=device)
    if commands.commands:
        _change_tables(code, added, tables)
    span = entry = 0
    for is_span, ranges, size in runs:
        if is_span:
            part = slice(span, span + size)
            _enter_spans(unit_list[part], row_list[part], absent[part], tables)
            span += size
        elif ranges:
            _forget(range_list[entry : entry + len(ranges)], tables)
            entry += len(ranges)
    return RestoredSpans(unit_list, row_list, absent)


def _encode(commands: tuple[Command, ...], latent_groups: int) -> tuple[_Ints, _Ints]:
    """Four numbers for each command, and the blocks of the units added."""
    encoded: _Ints = []
    blocks: _Ints = []
    for command in commands:
        match command:
            case PageBound(page, block):
                encoded += (kernels.BIND_PAGE.value, page, block, 0)
            case PageDropped(page, block):
                encoded += (kernels.DROP_PAGE.value, page, block, 0)
            case UnitAdded(unit, state, own):
                assert state != UnitState.DEAD, f"unit {unit} added dead"
                assert len(set(own)) == latent_groups, f"blocks {own} of a unit"
                encoded += (kernels.ADD_UNIT.value, unit, state, len(blocks) // latent_groups)
                blocks += own
            case UnitMoved(unit, state):
                allowed = (UnitState.REQUIRED, UnitState.OPTIONAL)
                assert state in allowed, f"unit {unit} to {state!r}"
                encoded += (kernels.MOVE_UNIT.value, unit, state, 0)
            case UnitLost(unit):
                encoded += (kernels.LOSE_UNIT.value, unit, 0, 0)
            case SpanRestored(unit, page, _):
                encoded += (kernels.RESTORE_SPAN.value, unit, page, 0)
    return encoded, blocks


def _ranges(command: Command, tables: Tables) -> _Ints:
    """Three numbers for what a command makes the map forget."""
    page_rows = tables.sizes.page_rows
    match command:
        case PageBound(page, _) | PageDropped(page, _):
            return [0, page * page_rows, page_rows]
        case UnitLost(unit):
            return [1, unit * UNIT_ROWS, UNIT_ROWS]
    return []


def _upload(lists: list[_Ints], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Move lists to the device in one copy, which waits for nothing."""
    flat = torch.tensor([number for part in lists for number in part], dtype=torch.int32)
    if device.type != "cpu" and flat.numel():
        flat = flat.pin_memory()
    flat = flat.to(device, non_blocking=True)
    ends = list(accumulate(len(part) for part in lists))
    return tuple(flat[end - len(part) : end] for part, end in zip(lists, ends, strict=True))


def _change_tables(code: torch.Tensor, added: torch.Tensor, tables: Tables) -> None:
    groups = tables.sizes.latent_groups
    kernels.change_tables[(1,)](
        code,
        added,
        tables.page_of_block,
        tables.block_of_page,
        tables.unit_blocks,
        tables.unit_of_block,
        tables.unit_state,
        tables.errors,
        code.numel() // 4,
        groups,
        DEAD=int(UnitState.DEAD),
        OPTIONAL=int(UnitState.OPTIONAL),
        BLOCK_GROUPS=shapes.next_power_of_two(groups),
        num_warps=1,
    )


def _forget(ranges: torch.Tensor, tables: Tables) -> None:
    kernels.forget_entries[(ranges.numel() // 3, tables.sizes.index_groups)](
        ranges,
        tables.slot_of_row,
        tables.row_of_slot,
        tables.age,
        tables.sizes.host_rows,
        tables.sizes.num_slots,
        FRESH_AGE=FRESH_AGE,
        BLOCK=UNIT_ROWS,
        num_warps=2,
    )


def _enter_spans(
    units: torch.Tensor, rows: torch.Tensor, absent: torch.Tensor, tables: Tables
) -> None:
    kernels.enter_spans[(tables.sizes.index_groups,)](
        units,
        rows,
        absent.view(torch.uint8),
        tables.slot_of_row,
        tables.row_of_slot,
        tables.age,
        tables.errors,
        units.numel(),
        tables.sizes.host_rows,
        tables.sizes.num_slots,
        UNIT_ROWS=UNIT_ROWS,
        FRESH_AGE=FRESH_AGE,
        num_warps=2,
    )
