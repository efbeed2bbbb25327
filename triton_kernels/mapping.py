"""Addresses of the rows that a step writes, and their entries in the map."""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.errors import (
    NO_HOST_PAGE_WRITTEN,
    OTHER_GROUP,
    OUTSIDE_TAIL,
    OUTSIDE_UNITS,
    PADDING_DIFFERS,
    report,
)


@triton.jit(do_not_specialize=["num_tokens"])
def find_host_rows(
    slot_mapping,  # [num_tokens] int64
    page_of_block,  # [num_blocks] int32
    rows,  # out [num_tokens] int64
    errors,
    num_tokens,
    page_rows,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Translate slots of the address group into host rows, -1 = padding."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    place = tl.load(slot_mapping + token, mask=inside, other=-1)
    real = place >= 0
    block = place // page_rows
    page = tl.load(page_of_block + block, mask=real & (block < num_blocks), other=-1).to(tl.int64)
    found = real & (page >= 0)
    report(errors, NO_HOST_PAGE_WRITTEN, real & (page < 0))
    tl.store(rows + token, tl.where(found, page * page_rows + place % page_rows, -1), mask=inside)


@triton.jit
def _place_tokens(
    first, slot_mapping, host_rows, unit_of_block, num_tokens, UNIT_ROWS, BLOCK: tl.constexpr
):
    """Return block, unit, slot and host row of tokens, and which are not padding."""
    token = first + tl.arange(0, BLOCK)
    inside = token < num_tokens
    place = tl.load(slot_mapping + token, mask=inside, other=-1)
    row = tl.load(host_rows + token, mask=inside, other=-1)
    real = (place >= 0) & (row >= 0)
    block = place // UNIT_ROWS
    unit = tl.load(unit_of_block + block, mask=real, other=-1)
    slot = unit * UNIT_ROWS + (place % UNIT_ROWS).to(tl.int32)
    return block, unit, slot, row, real, (place >= 0) != (row >= 0)


@triton.jit(do_not_specialize=["num_tokens"])
def enter_rows(
    slot_mapping,  # [num_tokens] int64
    host_rows,  # [num_tokens] int64
    unit_of_block,  # [num_blocks] int32
    unit_state,  # [num_units] uint8
    unit_blocks,  # [num_units] int32, strided
    slot_of_row,  # in, out [host_rows] int32
    row_of_slot,  # in, out [num_slots] int32
    age,  # in, out [num_slots] uint8
    errors,
    num_tokens,
    blocks_stride,
    UNIT_ROWS: tl.constexpr,
    TAIL: tl.constexpr,
    FRESH_AGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Enter written rows in the map, in one program.

    All old entries go before any new one comes: a row may take the slot that another row of
    the same step leaves.
    """
    nothing = tl.full([BLOCK], -1, tl.int32)
    fresh = tl.full([BLOCK], FRESH_AGE, tl.uint8)
    for first in range(0, num_tokens, BLOCK):
        block, unit, slot, row, real, differs = _place_tokens(
            first, slot_mapping, host_rows, unit_of_block, num_tokens, UNIT_ROWS, BLOCK
        )
        known = real & (unit >= 0)
        state = tl.load(unit_state + unit, mask=known, other=TAIL)
        own = tl.load(unit_blocks + unit * blocks_stride, mask=known, other=-1)
        report(errors, PADDING_DIFFERS, differs)
        report(errors, OUTSIDE_UNITS, real & (unit < 0))
        report(errors, OUTSIDE_TAIL, state != TAIL)
        report(errors, OTHER_GROUP, known & (own != block))
        old_slot = tl.load(slot_of_row + row, mask=known, other=-1)
        old_row = tl.load(row_of_slot + slot, mask=known, other=-1)
        tl.store(row_of_slot + old_slot, nothing, mask=old_slot >= 0)
        tl.store(age + old_slot, fresh, mask=old_slot >= 0)
        tl.store(slot_of_row + old_row, nothing, mask=old_row >= 0)
    tl.debug_barrier()
    for first in range(0, num_tokens, BLOCK):
        block, unit, slot, row, real, differs = _place_tokens(
            first, slot_mapping, host_rows, unit_of_block, num_tokens, UNIT_ROWS, BLOCK
        )
        known = real & (unit >= 0)
        tl.store(slot_of_row + row, slot, mask=known)
        tl.store(row_of_slot + slot, row.to(tl.int32), mask=known)
        tl.store(age + slot, fresh, mask=known)
