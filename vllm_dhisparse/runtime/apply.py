"""The commands of a step, one after the other; what an implementation adds is forgetting."""

from typing import Protocol

import torch

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
from vllm_dhisparse.runtime.restore import RestoredSpans, enter_span
from vllm_dhisparse.runtime.tables import (
    NO_BLOCK,
    NO_PAGE,
    NO_UNIT,
    UNIT_ROWS,
    Tables,
)


class Forget(Protocol):
    """Clears map entries of a range in every index group."""

    def __call__(self, tables: Tables, first: int, last: int) -> None:
        """Forget slots, or host rows, ``first .. last``."""


def apply_commands(
    commands: StepCommands, tables: Tables, forget_slots: Forget, forget_rows: Forget
) -> RestoredSpans:
    """Apply the commands of the step after ``tables.step``, in order."""
    begin_step(commands, tables)
    units, rows, absent = [], [], []
    for command in commands.commands:
        if isinstance(command, SpanRestored):
            units.append(command.unit)
            rows.append(command.page * tables.sizes.page_rows + command.first_row)
            absent.append(_restore(command, rows[-1], tables))
        else:
            _apply(command, tables, forget_slots, forget_rows)
    return RestoredSpans(
        torch.tensor(units, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
        torch.stack(absent) if absent else _no_rows(tables),
    )


def begin_step(commands: StepCommands, tables: Tables) -> None:
    """Assert that the commands are those of the next step, and note that they are applied."""
    assert tables.step == commands.step - 1, f"step {commands.step} applied after {tables.step}"
    tables.step = commands.step


def _no_rows(tables: Tables) -> torch.Tensor:
    return torch.zeros(0, tables.sizes.index_groups, UNIT_ROWS, dtype=torch.bool)


def _restore(command: SpanRestored, first_row: int, tables: Tables) -> torch.Tensor:
    unit, page, _ = command
    assert tables.unit_state[unit] == UnitState.OPTIONAL, f"a span restored into unit {unit}"
    assert tables.block_of_page[page] != NO_BLOCK, f"a span of unbound page {page}"
    return enter_span(unit, first_row, tables)


def _apply(command: Command, tables: Tables, forget_slots: Forget, forget_rows: Forget) -> None:
    page_rows = tables.sizes.page_rows
    match command:
        case PageBound(page, block):
            assert tables.block_of_page[page] == NO_BLOCK, f"page {page} is bound already"
            assert tables.page_of_block[block] == NO_PAGE, f"block {block} has a page already"
            tables.block_of_page[page] = block
            tables.page_of_block[block] = page
            forget_rows(tables, page * page_rows, (page + 1) * page_rows)
        case PageDropped(page, block):
            assert tables.page_of_block[block] == page, f"block {block} does not own page {page}"
            tables.block_of_page[page] = NO_BLOCK
            tables.page_of_block[block] = NO_PAGE
            forget_rows(tables, page * page_rows, (page + 1) * page_rows)
        case UnitAdded(unit, state, blocks):
            assert tables.unit_state[unit] == UnitState.DEAD, f"unit {unit} lives already"
            assert state != UnitState.DEAD, f"unit {unit} added dead"
            assert len(set(blocks)) == tables.sizes.latent_groups, f"blocks {blocks} of a unit"
            index = torch.tensor(blocks)
            assert (tables.unit_of_block[index] == NO_UNIT).all(), f"{blocks} are in a unit"
            tables.unit_state[unit] = state
            tables.unit_blocks[unit] = index
            tables.unit_of_block[index] = unit
        case UnitMoved(unit, state):
            assert tables.unit_state[unit] != UnitState.DEAD, f"dead unit {unit} moved"
            assert state in (UnitState.REQUIRED, UnitState.OPTIONAL), f"unit {unit} to {state!r}"
            tables.unit_state[unit] = state
        case UnitLost(unit):
            assert tables.unit_state[unit] != UnitState.DEAD, f"dead unit {unit} lost"
            tables.unit_of_block[tables.unit_blocks[unit].long()] = NO_UNIT
            tables.unit_blocks[unit] = NO_BLOCK
            tables.unit_state[unit] = UnitState.DEAD
            forget_slots(tables, unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)
