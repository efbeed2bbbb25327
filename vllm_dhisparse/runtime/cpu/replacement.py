"""Letting fetched rows into the cache: ``core.clock.sweep`` as one walk of the hand."""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.cpu.native import compiled

Words = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_FRESH_AGE, _MAX_AGE, _REQUIRED = FRESH_AGE, MAX_AGE, int(UnitState.REQUIRED)
_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)


@compiled
def _has(bitmap: Words, row: int) -> bool:
    return bool((bitmap[row >> 6] >> (np.uint64(row) & _LOW_BITS)) & _ONE)


@compiled
def let_in(
    rows: Int32s,
    missing: Bytes,
    union: Words,
    kept: Words,
    all_kept: bool,
    slot: Int32s,
    slot_of_row: Int32s,
    row_of_slot: Int32s,
    age: Bytes,
    hand: Int32s,
    unit_state: Bytes,
) -> None:
    """Give slots to missing rows in order, empty ones first, then hit the rows found."""
    rank = _next_missing(rows, missing, kept, all_kept, 0)
    num_slots, start = row_of_slot.size, hand[0]
    for half in range(2):  # from the hand on, and from the first slot to the hand
        first = 0 if half else start
        last = start if half else num_slots
        while first < last and rank < rows.size:
            end = min((first | 63) + 1, last)
            if unit_state[first >> 6] >= _REQUIRED:
                empty = 0
                for place in range(first, end):
                    empty += row_of_slot[place] < 0
                for place in range(first, end if empty else first):
                    if row_of_slot[place] < 0 and rank < rows.size:
                        row_of_slot[place] = rows[rank]
                        slot_of_row[rows[rank]] = place
                        age[place] = _FRESH_AGE
                        slot[rank] = place
                        rank = _next_missing(rows, missing, kept, all_kept, rank + 1)
            first = end

    place, walked = start, 0
    while walked < (_MAX_AGE + 1) * num_slots and rank < rows.size:
        end = min((place | 63) + 1, num_slots)
        if unit_state[place >> 6] < _REQUIRED:
            walked += end - place
            place = 0 if end == num_slots else end
            continue
        while place < end and rank < rows.size:
            walked += 1
            if age[place] > 0:
                # Rows of the union that are kept are hit below, whatever their age here.
                if all_kept or not _has(union, row_of_slot[place]):
                    age[place] -= 1
            elif not _has(union, row_of_slot[place]):
                slot_of_row[row_of_slot[place]] = -1
                row_of_slot[place] = rows[rank]
                slot_of_row[rows[rank]] = place
                slot[rank] = place
                rank = _next_missing(rows, missing, kept, all_kept, rank + 1)
                hand[0] = 0 if place + 1 == num_slots else place + 1
            place += 1
        if place == num_slots:
            place = 0

    for index in range(rows.size):
        if not missing[index] and (all_kept or _has(kept, rows[index])):
            age[slot[index]] = _MAX_AGE


@compiled
def _next_missing(rows: Int32s, missing: Bytes, kept: Words, all_kept: bool, rank: int) -> int:
    while rank < rows.size and not (missing[rank] and (all_kept or _has(kept, rows[rank]))):
        rank += 1
    return rank


@compiled
def count_kept(rows: Int32s, chosen: Bytes, kept: Words) -> tuple[int, int]:
    """Return how many of the chosen rows are kept, and how many are not."""
    inside, total = 0, 0
    for index in range(rows.size):
        if chosen[index]:
            total += 1
            inside += _has(kept, rows[index])
    return inside, total - inside
