"""Serving a union larger than staging in passes over the queries."""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.runtime.cpu.native import compiled

Words = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)


@compiled
def split(
    selected: Int32s,
    request_of_token: Int32s,
    visible: Int32s,
    block_table: Int32s,
    page_of_block: Int32s,
    page_rows: int,
    staging_rows: int,
    union: Words,
    last_of_pass: Int32s,
    rows_of_pass: Int32s,
) -> int:
    """Cut the tokens before each one whose rows no longer fit; return the number of passes.

    ``union`` is scratch.
    """
    passes, rows, token = 0, 0, 0
    union[:] = 0
    while token < selected.shape[0]:
        before = rows
        request = request_of_token[token]
        limit = visible[token] if request >= 0 else 0
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
def pick(
    rows: Int32s,
    all_rows: Int32s,
    all_slot: Int32s,
    all_tier: Bytes,
    pending: Bytes,
    slot: Int32s,
    tier: Bytes,
    fetch: Bytes,
) -> None:
    """Look up the rows of one pass among those of the step; both ascend.

    A row with a slot is fetched by the first pass that reads it and pending no more.
    """
    place = 0
    for rank in range(rows.size):
        while all_rows[place] != rows[rank]:
            place += 1
        slot[rank] = all_slot[place]
        tier[rank] = all_tier[place]
        fetch[rank] = pending[place]
        if slot[rank] >= 0:
            pending[place] = 0
