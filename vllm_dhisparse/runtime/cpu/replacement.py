"""Letting fetched rows into the cache: ``core.clock.sweep`` as one walk of the hand."""

import numpy as np

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, lowest_bit, prefetch
from vllm_dhisparse.runtime.cpu.state import IN_USE, Cache, Found, Int32s
from vllm_dhisparse.runtime.tables import UNIT_ROWS

_UNIT_ROWS, _TURNS, _REQUIRED = UNIT_ROWS, MAX_AGE + 1, int(UnitState.REQUIRED)
_TAKEN = IN_USE | np.uint8(FRESH_AGE)
_ONE = np.uint64(1)
_AHEAD = 32  # rows between the prefetch of a map entry and its change


@compiled
def let_in(found: Found, missing: Int32s, taken: Int32s, cache: Cache) -> None:
    """Give slots to the missing rows, in order, as long as there are any.

    Slots in use are never taken. ``missing`` holds indices into ``found``; ``taken`` is
    scratch of the same size.
    """
    age = cache.age
    number = _take_oldest(_take_empty(taken, cache), taken, cache)
    _move_in(found, missing[:number], taken, cache)
    for slot in range(age.size):
        age[slot] &= ~IN_USE


@compiled
def _take_empty(taken: Int32s, cache: Cache) -> int:
    """Take empty slots from the hand on; return their number."""
    row_of_slot, age, unit_state = cache.row_of_slot, cache.age, cache.unit_state
    num_slots, number = row_of_slot.size, 0
    first, walked = cache.hand[0], 0
    while walked < num_slots and number < taken.size:
        last = min((first // _UNIT_ROWS + 1) * _UNIT_ROWS, first + num_slots - walked)
        walked += last - first
        if unit_state[first // _UNIT_ROWS] >= _REQUIRED:
            rows, least = row_of_slot[first:last], np.int32(0)
            for offset in range(rows.size):
                least |= rows[offset]
            for offset in range(rows.size if least < 0 else 0):
                if rows[offset] < 0 and number < taken.size:
                    taken[number] = first + offset
                    age[first + offset] = _TAKEN
                    number += 1
        first = last % num_slots
    return number


@compiled
def _take_oldest(number: int, taken: Int32s, cache: Cache) -> int:
    """Add slots to the ``number`` taken as the hand finds them; return how many it then is."""
    unit_state, num_slots, num_empty = cache.unit_state, cache.age.size, number
    first, walked = cache.hand[0], 0
    while walked < _TURNS * num_slots and number < taken.size:
        last = (first // _UNIT_ROWS + 1) * _UNIT_ROWS
        walked += last - first
        if unit_state[first // _UNIT_ROWS] >= _REQUIRED:
            age, old = cache.age[first:last], np.uint64(0)
            for offset in range(age.size):
                old |= np.uint64(age[offset] == 0) << np.uint64(offset)
            stop = 0
            for index in range(number, min(number + count_bits(old), taken.size)):
                stop = lowest_bit(old)
                old &= old - _ONE
                taken[index] = first + stop
                age[stop] = _TAKEN
                number += 1
            passed = age[:stop] if number == taken.size else age
            for offset in range(passed.size):
                passed[offset] -= (passed[offset] > 0) & (passed[offset] < IN_USE)
        first = last % num_slots
    if number > num_empty:
        cache.hand[0] = (taken[number - 1] + 1) % num_slots
    return number


@compiled
def _move_in(found: Found, missing: Int32s, taken: Int32s, cache: Cache) -> None:
    """Move each missing row into the slot taken for it, and the row that was there out."""
    rows, slot_of_rank = found.rows, found.slot
    slot_of_row, row_of_slot, map_address = (
        cache.slot_of_row,
        cache.row_of_slot,
        cache.slot_of_row_address,
    )
    for index in range(missing.size):
        if index + _AHEAD < missing.size:
            prefetch(map_address + 4 * np.int64(row_of_slot[taken[index + _AHEAD]]))
            prefetch(map_address + 4 * np.int64(rows[missing[index + _AHEAD]]))
        slot, row = taken[index], rows[missing[index]]
        if row_of_slot[slot] >= 0:
            slot_of_row[row_of_slot[slot]] = -1
        row_of_slot[slot] = row
        slot_of_row[row] = slot
        slot_of_rank[missing[index]] = slot
