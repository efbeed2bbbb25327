"""Commands of a step on the worker's tables.

``change_tables`` goes through them one by one, in one program: they are few, and each may
depend on the one before. What they clear in the map of each index group, and the spans
they restore, touch no other table and run apart, in parallel.
"""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.errors import (
    BLOCK_IN_UNIT,
    PAGE_BOUND_TWICE,
    PAGE_NOT_OWNED,
    SPAN_OF_UNBOUND_PAGE,
    SPAN_OUTSIDE_OPTIONAL,
    SPAN_OVER_ROWS,
    UNIT_IS_DEAD,
    UNIT_LIVES,
    report,
    report_if,
)

BIND_PAGE = tl.constexpr(0)
DROP_PAGE = tl.constexpr(1)
ADD_UNIT = tl.constexpr(2)
MOVE_UNIT = tl.constexpr(3)
LOSE_UNIT = tl.constexpr(4)
RESTORE_SPAN = tl.constexpr(5)


@triton.jit(do_not_specialize=["commands", "blocks", "num_commands"])
def change_tables(
    commands,  # [num_commands, 4] int32: kind, page or unit, block or state, number in blocks
    blocks,  # [units added, groups] int32
    page_of_block,  # in, out [num_blocks] int32, as all that follow
    block_of_page,
    unit_blocks,  # [num_units, groups]
    unit_of_block,
    unit_state,  # uint8
    errors,
    num_commands,
    groups,
    DEAD: tl.constexpr,
    OPTIONAL: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Bind and drop pages; add, move and lose units."""
    group = tl.arange(0, BLOCK_GROUPS)
    is_group = group < groups
    for number in range(0, num_commands):
        tl.debug_barrier()  # the stores of one command come before the loads of the next
        command = commands + number * 4
        kind = tl.load(command)
        first = tl.load(command + 1)
        second = tl.load(command + 2)
        if kind == BIND_PAGE:
            bound = (tl.load(block_of_page + first) >= 0) | (tl.load(page_of_block + second) >= 0)
            report_if(errors, PAGE_BOUND_TWICE, bound)
            tl.store(block_of_page + first, second)
            tl.store(page_of_block + second, first)
        if kind == DROP_PAGE:
            report_if(errors, PAGE_NOT_OWNED, tl.load(page_of_block + second) != first)
            tl.store(block_of_page + first, -1)
            tl.store(page_of_block + second, -1)
        if kind == ADD_UNIT:
            block = tl.load(blocks + tl.load(command + 3) * groups + group, mask=is_group, other=0)
            owner = tl.load(unit_of_block + block, mask=is_group, other=-1)
            report_if(errors, UNIT_LIVES, tl.load(unit_state + first) != DEAD)
            report(errors, BLOCK_IN_UNIT, owner >= 0)
            tl.store(unit_state + first, second.to(tl.uint8))
            tl.store(unit_blocks + first * groups + group, block, mask=is_group)
            tl.store(unit_of_block + block, first + group * 0, mask=is_group)
        if kind == MOVE_UNIT:
            report_if(errors, UNIT_IS_DEAD, tl.load(unit_state + first) == DEAD)
            tl.store(unit_state + first, second.to(tl.uint8))
        if kind == LOSE_UNIT:
            report_if(errors, UNIT_IS_DEAD, tl.load(unit_state + first) == DEAD)
            nothing = tl.full([BLOCK_GROUPS], -1, tl.int32)
            block = tl.load(unit_blocks + first * groups + group, mask=is_group, other=-1)
            tl.store(unit_of_block + block, nothing, mask=block >= 0)
            tl.store(unit_blocks + first * groups + group, nothing, mask=is_group)
            tl.store(unit_state + first, tl.full([], DEAD, tl.uint8))
        if kind == RESTORE_SPAN:
            report_if(errors, SPAN_OUTSIDE_OPTIONAL, tl.load(unit_state + first) != OPTIONAL)
            report_if(errors, SPAN_OF_UNBOUND_PAGE, tl.load(block_of_page + second) < 0)


@triton.jit(do_not_specialize=["ranges"])
def forget_entries(
    ranges,  # [num_ranges, 3] int32: 1 for slots or 0 for host rows, first, how many
    slot_of_row,  # in, out [groups, num_host_rows] int32
    row_of_slot,  # in, out [groups, num_slots] int32
    age,  # in, out [groups, num_slots] uint8
    num_host_rows,
    num_slots,
    FRESH_AGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Clear the map entries of slots and host rows; what two ranges share is cleared twice."""
    part = ranges + tl.program_id(0) * 3
    group = tl.program_id(1).to(tl.int64)
    forward = slot_of_row + group * num_host_rows
    inverse = row_of_slot + group * num_slots
    ages = age + group * num_slots
    are_slots = tl.load(part)
    first = tl.load(part + 1)
    size = tl.load(part + 2)
    nothing = tl.full([BLOCK], -1, tl.int32)
    fresh = tl.full([BLOCK], FRESH_AGE, tl.uint8)
    for start in range(0, size, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        key = first + offset
        inside = offset < size
        if are_slots:
            row = tl.load(inverse + key, mask=inside, other=-1)
            tl.store(forward + row, nothing, mask=row >= 0)
            tl.store(inverse + key, nothing, mask=inside)
            tl.store(ages + key, fresh, mask=inside)
        else:
            slot = tl.load(forward + key, mask=inside, other=-1)
            tl.store(inverse + slot, nothing, mask=slot >= 0)
            tl.store(ages + slot, fresh, mask=slot >= 0)
            tl.store(forward + key, nothing, mask=inside)


@triton.jit(do_not_specialize=["units", "first_rows", "absent", "num_spans"])
def enter_spans(
    units,  # [num_spans] int32
    first_rows,  # [num_spans] int32
    absent,  # out [num_spans, groups, UNIT_ROWS] uint8: rows that had no slot
    slot_of_row,  # in, out [groups, num_host_rows] int32
    row_of_slot,  # in, out [groups, num_slots] int32
    age,  # in, out [groups, num_slots] uint8
    errors,
    num_spans,
    num_host_rows,
    num_slots,
    UNIT_ROWS: tl.constexpr,
    FRESH_AGE: tl.constexpr,
):
    """Enter the rows of spans that have no slot, one span after the other, in each group."""
    group = tl.program_id(0).to(tl.int64)
    forward = slot_of_row + group * num_host_rows
    inverse = row_of_slot + group * num_slots
    offset = tl.arange(0, UNIT_ROWS)
    for number in range(0, num_spans):
        tl.debug_barrier()  # a row may be in two spans
        row = tl.load(first_rows + number) + offset
        slot = tl.load(units + number) * UNIT_ROWS + offset
        report(errors, SPAN_OVER_ROWS, tl.load(inverse + slot) >= 0)
        enters = tl.load(forward + row) < 0
        tl.debug_barrier()
        tl.store(forward + row, slot, mask=enters)
        tl.store(inverse + slot, row, mask=enters)
        tl.store(age + group * num_slots + slot, tl.full([UNIT_ROWS], FRESH_AGE, tl.uint8))
        out = absent + (number * tl.num_programs(0) + group) * UNIT_ROWS + offset
        tl.store(out, enters.to(tl.uint8))
