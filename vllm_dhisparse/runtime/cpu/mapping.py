"""Changes of the map between host rows and slots."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dhisparse.core.clock import FRESH_AGE
from vllm_dhisparse.core.commands import StepCommands, UnitState
from vllm_dhisparse.runtime.apply import apply_commands
from vllm_dhisparse.runtime.cpu.native import compiled
from vllm_dhisparse.runtime.restore import RestoredSpans
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables

_UNIT_ROWS, _FRESH_AGE, _TAIL = UNIT_ROWS, FRESH_AGE, int(UnitState.TAIL)

_WRITE_ERRORS = {
    1: "padding of the two slot mappings differs",
    2: "a row is written outside all units",
    3: "a row is written outside a tail",
    4: "block of another group",
}


def apply(commands: StepCommands, tables: Tables) -> RestoredSpans:
    return apply_commands(commands, tables, _forget_slots, _forget_rows)


def host_rows(slot_mapping: torch.Tensor, tables: Tables) -> torch.Tensor:
    rows = torch.empty_like(slot_mapping)
    complete = _find_host_rows(
        slot_mapping.numpy(), tables.page_of_block.numpy(), tables.sizes.page_rows, rows.numpy()
    )
    assert complete, "a row is written without a host page"
    return rows


def enter(
    slot_mapping: torch.Tensor,
    latent_group: int,
    host_rows: torch.Tensor,
    tables: Tables,
    index_group: int,
) -> None:
    slot_of_row, row_of_slot, age, _ = tables.group(index_group)
    error = _enter(
        slot_mapping.numpy(),
        host_rows.numpy(),
        tables.unit_of_block.numpy(),
        tables.unit_state.numpy(),
        tables.unit_blocks[:, latent_group].numpy(),
        slot_of_row.numpy(),
        row_of_slot.numpy(),
        age.numpy(),
    )
    assert error == 0, _WRITE_ERRORS[error]


def _forget_slots(tables: Tables, first: int, last: int) -> None:
    _clear(tables.row_of_slot.numpy(), tables.slot_of_row.numpy(), first, last)
    tables.age[:, first:last] = FRESH_AGE


def _forget_rows(tables: Tables, first: int, last: int) -> None:
    _clear_aged(
        tables.slot_of_row.numpy(), tables.row_of_slot.numpy(), tables.age.numpy(), first, last
    )


@compiled
def _clear(forward: Any, inverse: Any, first: int, last: int) -> None:
    for group in range(forward.shape[0]):
        for key in range(first, last):
            value = forward[group, key]
            if value >= 0:
                inverse[group, value] = -1
                forward[group, key] = -1


@compiled
def _clear_aged(forward: Any, inverse: Any, age: Any, first: int, last: int) -> None:
    for group in range(forward.shape[0]):
        for key in range(first, last):
            value = forward[group, key]
            if value >= 0:
                inverse[group, value] = -1
                age[group, value] = _FRESH_AGE
                forward[group, key] = -1


@compiled
def _find_host_rows(
    slot_mapping: NDArray[np.int64],
    page_of_block: NDArray[np.int32],
    page_rows: int,
    rows: NDArray[np.int64],
) -> bool:
    for token in range(slot_mapping.size):
        slot = slot_mapping[token]
        rows[token] = -1
        if slot >= 0:
            page = np.int64(page_of_block[slot // page_rows])
            if page < 0:
                return False
            rows[token] = page * page_rows + slot % page_rows
    return True


@compiled
def _enter(
    slot_mapping: NDArray[np.int64],
    host_rows: NDArray[np.int64],
    unit_of_block: NDArray[np.int32],
    unit_state: NDArray[np.uint8],
    unit_blocks: NDArray[np.int32],
    slot_of_row: NDArray[np.int32],
    row_of_slot: NDArray[np.int32],
    age: NDArray[np.uint8],
) -> int:
    for token in range(slot_mapping.size):
        place, row = slot_mapping[token], host_rows[token]
        if (place < 0) != (row < 0):
            return 1
        if place < 0:
            continue
        unit = unit_of_block[place // _UNIT_ROWS]
        if unit < 0:
            return 2
        if unit_state[unit] != _TAIL:
            return 3
        if unit_blocks[unit] != place // _UNIT_ROWS:
            return 4
        slot = unit * _UNIT_ROWS + place % _UNIT_ROWS
        old_slot, old_row = slot_of_row[row], row_of_slot[slot]
        if old_slot >= 0:
            row_of_slot[old_slot] = -1
            age[old_slot] = _FRESH_AGE
        if old_row >= 0:
            slot_of_row[old_row] = -1
        slot_of_row[row] = slot
        row_of_slot[slot] = row
        age[slot] = _FRESH_AGE
    return 0
