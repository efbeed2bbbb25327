"""Where the rows of a union are on the device."""

import numpy as np

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.runtime.cpu.native import compiled, prefetch
from vllm_dhisparse.runtime.cpu.state import IN_USE, Cache, Found, Int32s, Kept
from vllm_dhisparse.runtime.cpu.union import has

_HIT = IN_USE | np.uint8(MAX_AGE)
_AHEAD = 192  # rows between the prefetch of a map entry and its use


@compiled
def look_up(found: Found, kept: Kept, cache: Cache, missing: Int32s) -> tuple[int, int]:
    """Find slot and tier of each row, and which rows are at home only.

    Ages of the slots found get ``IN_USE``, those of kept rows the age of a hit too.
    Returns how many rows are missing and kept, and how many are missing and not;
    ``missing`` gets the indices of the first.
    """
    rows, slot_of_rank, tier, fetch = found
    slot_of_row, unit_state, age = cache.slot_of_row, cache.unit_state, cache.age
    map_address, kept_rows, all_kept = cache.slot_of_row_address, kept.rows, kept.all
    size, number, others = slot_of_rank.size, 0, 0
    for rank in range(size):
        if rank + _AHEAD < size:
            prefetch(map_address + 4 * np.int64(rows[rank + _AHEAD]))
        row = rows[rank]
        slot = slot_of_row[row]
        wanted = all_kept or has(kept_rows, row)
        slot_of_rank[rank] = slot
        fetch[rank] = slot < 0
        if slot < 0:
            tier[rank] = 0
            missing[number] = rank
            number += wanted
            others += not wanted
        else:
            tier[rank] = unit_state[slot >> 6]
            age[slot] |= _HIT if wanted else IN_USE
    return number, others
