"""Serving a union larger than staging in passes over the queries."""

import numpy as np

from vllm_dhisparse.runtime.cpu.native import compiled
from vllm_dhisparse.runtime.cpu.state import Asked, Bytes, Found, Int32s, Kept, Words
from vllm_dhisparse.runtime.cpu.union import has

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)


@compiled
def split(
    asked: Asked, staging_rows: int, union: Words, last_of_pass: Int32s, rows_of_pass: Int32s
) -> int:
    """Cut the tokens before each one whose rows no longer fit; return the number of passes.

    ``union`` is scratch.
    """
    selected, block_table, page_of_block = asked.selected, asked.block_table, asked.page_of_block
    passes, rows, token, page_rows = 0, 0, 0, asked.page_rows
    union[:] = 0
    while token < selected.shape[0]:
        before = rows
        request = asked.request_of_token[token]
        limit = asked.visible[token] if request >= 0 else 0
        for rank in range(selected.shape[1]):
            position = selected[token, rank]
            if 0 <= position < limit:
                page = page_of_block[block_table[request, position // page_rows]]
                row = page * page_rows + position % page_rows
                bit = _ONE << (np.uint64(row) & _LOW_BITS)
                rows += (union[row >> 6] & bit) == 0
                union[row >> 6] |= bit
        if rows > staging_rows:
            last_of_pass[passes], rows_of_pass[passes] = token, before
            passes += 1
            rows = 0
            union[:] = 0
        else:
            token += 1
    last_of_pass[passes], rows_of_pass[passes] = selected.shape[0], rows
    return passes + 1


@compiled
def pick(part: Found, step: Found, pending: Bytes) -> None:
    """Look up the rows of one pass among those of the step.

    A row with a slot is fetched by the first pass that reads it and pending no more.
    """
    rows, slot, tier, fetch = part
    all_rows, all_slots, all_tiers, _ = step
    place = 0
    for rank in range(slot.size):
        while all_rows[place] != rows[rank]:
            place += 1
        slot[rank] = all_slots[place]
        tier[rank] = all_tiers[place]
        fetch[rank] = pending[place]
        if slot[rank] >= 0:
            pending[place] = 0


@compiled
def count_fetches(part: Found, kept: Kept) -> tuple[int, int]:
    """Return how many of the rows that a pass fetches are kept, and how many are not."""
    rows, fetch = part.rows, part.fetch
    total, inside = 0, 0
    for rank in range(fetch.size):
        total += fetch[rank]
        inside += fetch[rank] and (kept.all or has(kept.rows, rows[rank]))
    return inside, total - inside
