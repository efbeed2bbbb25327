"""Letting fetched rows into the cache: ``core.clock.sweep`` as one walk of the hand."""

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.cpu.native import compiled
from vllm_dhisparse.runtime.cpu.state import IN_USE, Bytes, Cache, Found, Int32s, Kept
from vllm_dhisparse.runtime.cpu.union import has
from vllm_dhisparse.runtime.tables import UNIT_ROWS

_FRESH_AGE, _TURNS, _REQUIRED = FRESH_AGE, MAX_AGE + 1, int(UnitState.REQUIRED)
_UNIT_ROWS = UNIT_ROWS


@compiled
def let_in(found: Found, kept: Kept, cache: Cache) -> None:
    """Give slots to missing rows that are kept, in order; slots in use are never taken."""
    rows, slot, _, fetch = found
    slot_of_row, row_of_slot, age = cache.slot_of_row, cache.row_of_slot, cache.age
    hand, unit_state, num_slots = cache.hand, cache.unit_state, row_of_slot.size
    first, walked = hand[0], 0
    rank = _fill_empty(_next(0, rows, fetch, kept), found, kept, cache)
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
                    rank = _next(rank + 1, rows, fetch, kept)
                    if rank == rows.size:
                        stop = place
                        break
            for place in range(first, stop):
                age[place] -= (age[place] > 0) & (age[place] < IN_USE)
        first = last % num_slots

    for place in range(num_slots):
        age[place] &= ~IN_USE


@compiled
def _fill_empty(rank: int, found: Found, kept: Kept, cache: Cache) -> int:
    """Put rows from ``rank`` on into empty slots; return the next row without a slot."""
    rows, slot, _, fetch = found
    slot_of_row, row_of_slot, age = cache.slot_of_row, cache.row_of_slot, cache.age
    unit_state, num_slots = cache.unit_state, row_of_slot.size
    first, walked = cache.hand[0], 0
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
                    rank = _next(rank + 1, rows, fetch, kept)
        first = last % num_slots
    return rank


@compiled
def _next(rank: int, rows: Int32s, fetch: Bytes, kept: Kept) -> int:
    """Return the first rank from ``rank`` on whose row is missing and kept."""
    while rank < rows.size and not (fetch[rank] and (kept.all or has(kept.rows, rows[rank]))):
        rank += 1
    return rank


@compiled
def count_fetches(found: Found, kept: Kept) -> tuple[int, int]:
    """Return how many of the fetched rows are kept, and how many are not."""
    rows, _, _, fetch = found
    total, inside = 0, 0
    for rank in range(rows.size):
        total += fetch[rank]
    if kept.all:
        return total, 0
    for rank in range(rows.size):
        if fetch[rank]:
            inside += has(kept.rows, rows[rank])
    return inside, total - inside
