"""Letting fetched rows into the cache: ``core.clock.sweep`` as one walk of the hand."""

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.cpu.native import compiled
from vllm_dhisparse.runtime.cpu.union import IN_USE, Bytes, Int32s, Words, has
from vllm_dhisparse.runtime.tables import UNIT_ROWS

_FRESH_AGE, _TURNS, _REQUIRED = FRESH_AGE, MAX_AGE + 1, int(UnitState.REQUIRED)
_UNIT_ROWS = UNIT_ROWS


@compiled
def let_in(
    rows: Int32s,
    missing: Bytes,
    kept: Words,
    all_kept: bool,
    slot: Int32s,
    slot_of_row: Int32s,
    row_of_slot: Int32s,
    age: Bytes,
    hand: Int32s,
    unit_state: Bytes,
) -> None:
    """Give slots to missing rows that are kept, in order; slots in use are never taken."""
    start, num_slots = hand[0], row_of_slot.size
    rank = _next(rows, missing, kept, all_kept, 0)
    rank = _fill(
        start, rank, rows, missing, kept, all_kept, slot, slot_of_row, row_of_slot, age, unit_state
    )
    first, walked = start, 0
    while walked < _TURNS * num_slots and rank < rows.size:
        last = (first // _UNIT_ROWS + 1) * _UNIT_ROWS
        walked += last - first
        if unit_state[first // _UNIT_ROWS] >= _REQUIRED:
            stop = last
            for place in range(first, last):
                if age[place] == 0:
                    slot_of_row[row_of_slot[place]] = -1
                    row_of_slot[place] = rows[rank]
                    slot_of_row[rows[rank]] = place
                    slot[rank] = place
                    age[place] = IN_USE | _FRESH_AGE
                    hand[0] = (place + 1) % num_slots
                    rank = _next(rows, missing, kept, all_kept, rank + 1)
                    if rank == rows.size:
                        stop = place
                        break
            for place in range(first, stop):
                age[place] -= (age[place] > 0) & (age[place] < IN_USE)
        first = last % num_slots

    for place in range(num_slots):
        age[place] &= ~IN_USE


@compiled
def _fill(
    start: int,
    rank: int,
    rows: Int32s,
    missing: Bytes,
    kept: Words,
    all_kept: bool,
    slot: Int32s,
    slot_of_row: Int32s,
    row_of_slot: Int32s,
    age: Bytes,
    unit_state: Bytes,
) -> int:
    """Put missing rows from ``rank`` on into empty slots; return the next without a slot."""
    first, walked, num_slots = start, 0, row_of_slot.size
    while walked < num_slots and rank < rows.size:
        last = min((first // _UNIT_ROWS + 1) * _UNIT_ROWS, first + num_slots - walked)
        walked += last - first
        if unit_state[first // _UNIT_ROWS] >= _REQUIRED:
            empty = 0
            for place in range(first, last):
                empty += row_of_slot[place] < 0
            for place in range(first, last if empty else first):
                if row_of_slot[place] < 0 and rank < rows.size:
                    row_of_slot[place] = rows[rank]
                    slot_of_row[rows[rank]] = place
                    slot[rank] = place
                    age[place] = IN_USE | _FRESH_AGE
                    rank = _next(rows, missing, kept, all_kept, rank + 1)
        first = last % num_slots
    return rank


@compiled
def _next(rows: Int32s, missing: Bytes, kept: Words, all_kept: bool, rank: int) -> int:
    """Return the first rank from ``rank`` on whose row is missing and kept."""
    while rank < rows.size and not (missing[rank] and (all_kept or has(kept, rows[rank]))):
        rank += 1
    return rank


@compiled
def count_kept(rows: Int32s, chosen: Bytes, kept: Words, all_kept: bool) -> tuple[int, int]:
    """Return how many of the chosen rows are kept, and how many are not."""
    total, inside = 0, 0
    for index in range(rows.size):
        total += chosen[index]
    if all_kept:
        return total, 0
    for index in range(rows.size):
        if chosen[index]:
            inside += has(kept, rows[index])
    return inside, total - inside
