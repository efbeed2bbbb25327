"""CLOCK replacement in closed form: ``core.clock.sweep`` as sums over tiles of slots.

Places count from the hand on. Slots fall in classes in the order in which they are taken:
class 0 is empty, class ``1 + age`` replaceable. All others have class ``CLASSES``.
"""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.bits import has_row, sums_of_tiles

CLASSES = tl.constexpr(5)


@triton.jit
def _slots_of_tile(tile, hand, num_slots, BLOCK: tl.constexpr):
    """Return the slots of a tile of places, and which places there are."""
    place = tile * BLOCK + tl.arange(0, BLOCK)
    slot = place + tl.load(hand)
    return tl.where(slot >= num_slots, slot - num_slots, slot), place < num_slots


@triton.jit
def _classify(slot, inside, union, row_of_slot, age, unit_state, UNIT_ROWS, REQUIRED):
    state = tl.load(unit_state + slot // UNIT_ROWS, mask=inside, other=0)
    cache = inside & (state >= REQUIRED)
    row = tl.load(row_of_slot + slot, mask=cache, other=-1)
    used = has_row(union, row, row >= 0)
    old = tl.load(age + slot, mask=cache, other=0).to(tl.int32)
    kind = tl.where(row < 0, 0, 1 + old)
    return tl.where(cache & (used == 0), kind, CLASSES)


@triton.jit(do_not_specialize=["num_missing_tiles"])
def count_classes(
    missing,  # [num_missing_tiles] int32
    union,  # [num_words] int32
    row_of_slot,  # [num_slots] int32
    age,  # [num_slots] uint8
    unit_state,  # [num_units] uint8
    hand,  # [1] int32
    counts,  # out [CLASSES, tiles] int32
    num_missing_tiles,
    num_slots,
    UNIT_ROWS: tl.constexpr,
    REQUIRED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """Count the slots of each class in each tile; nothing to do when nothing is missing."""
    tile = tl.program_id(0)
    _, wanted = sums_of_tiles(missing, 0, num_missing_tiles, SUM_BLOCK)
    if wanted > 0:
        slot, inside = _slots_of_tile(tile, hand, num_slots, BLOCK)
        kind = _classify(slot, inside, union, row_of_slot, age, unit_state, UNIT_ROWS, REQUIRED)
        for number in tl.static_range(CLASSES):
            count = tl.sum((kind == number).to(tl.int32))
            tl.store(counts + number * tl.num_programs(0) + tile, count)


@triton.jit
def _tile_of(counts, index, num_tiles, BLOCK: tl.constexpr):
    """Return the tile that holds the slot of this index in its class."""
    before = 0
    tile = 0
    for first in range(0, num_tiles, BLOCK):
        place = first + tl.arange(0, BLOCK)
        count = tl.load(counts + place, mask=place < num_tiles, other=0)
        through = before + tl.cumsum(count, 0)
        tile += tl.sum(((through <= index) & (place < num_tiles)).to(tl.int32))
        before += tl.sum(count)
    return tile


@triton.jit(do_not_specialize=["num_missing_tiles"])
def take_slots(
    missing,
    union,
    row_of_slot,
    age,  # in, out
    unit_state,
    hand,
    counts,  # [CLASSES, tiles] int32
    taken,  # out [>= wanted] int32: slots in the order taken
    sweep,  # out [2] int32: how many are taken, and the new hand
    num_missing_tiles,
    num_slots,
    UNIT_ROWS: tl.constexpr,
    REQUIRED: tl.constexpr,
    FRESH_AGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """Take as many slots as rows are missing, and age those that the hand passes over."""
    tile = tl.program_id(0)
    num_tiles = tl.num_programs(0)
    _, wanted = sums_of_tiles(missing, 0, num_missing_tiles, SUM_BLOCK)
    if wanted > 0:
        slot, inside = _slots_of_tile(tile, hand, num_slots, BLOCK)
        kind = _classify(slot, inside, union, row_of_slot, age, unit_state, UNIT_ROWS, REQUIRED)
        order = tl.zeros([BLOCK], tl.int32)
        start = 0
        for number in tl.static_range(CLASSES):
            before, total = sums_of_tiles(counts + number * num_tiles, tile, num_tiles, SUM_BLOCK)
            member = (kind == number).to(tl.int32)
            rank = start + before + tl.cumsum(member, 0) - member
            order = tl.where(kind == number, rank, order)
            start += total
        wanted = tl.minimum(wanted, start)
        take = (kind < CLASSES) & (order < wanted)
        tl.store(taken + order, slot, mask=take)

        # The class of the last slot taken, where it starts, and the tile of that slot.
        last_class = 0
        last_start = 0
        start = 0
        for number in tl.static_range(CLASSES):
            _, total = sums_of_tiles(counts + number * num_tiles, 0, num_tiles, SUM_BLOCK)
            holds = (start < wanted) & (wanted <= start + total)
            last_class = tl.where(holds, number, last_class)
            last_start = tl.where(holds, start, last_start)
            start += total
        if last_class > 0:
            last_counts = counts + last_class * num_tiles
            last_tile = _tile_of(last_counts, wanted - 1 - last_start, num_tiles, SUM_BLOCK)
            is_last = take & (order == wanted - 1)
            place = tl.arange(0, BLOCK)
            last_place = tl.sum(tl.where(is_last, place, 0))
            last_place = tl.where(tile < last_tile, BLOCK, last_place)
            last_place = tl.where(tile > last_tile, -1, last_place)
            turns = last_class - 1 + (place <= last_place).to(tl.int32)
            left = tl.maximum(kind - 1 - turns, 0)
            passed = (kind > 0) & (kind < CLASSES)
            tl.store(age + slot, left.to(tl.uint8), mask=passed & (take == 0))
            following = tl.where(slot + 1 == num_slots, 0, slot + 1)
            tl.store(sweep + 1 + place * 0, following, mask=is_last)
        tl.store(age + slot, tl.full([BLOCK], FRESH_AGE, tl.uint8), mask=take)
        if tile == 0:
            tl.store(sweep, wanted)
            if last_class == 0:
                tl.store(sweep + 1, tl.load(hand))


@triton.jit(do_not_specialize=["capacity"])
def move_in(
    rows,  # [capacity] int32: host rows of the union, -1 = none
    generation,  # [num_words] int32
    fetch,  # [capacity] uint8
    missing,  # [tiles] int32
    taken,
    sweep,
    slot_of_row,  # in, out [host_rows] int32
    row_of_slot,  # in, out [num_slots] int32
    hand,  # out [1] int32
    slot,  # in, out [capacity] int32
    capacity,
    BLOCK: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """Move each missing row into the slot taken for it, and the row that was there out."""
    tile = tl.program_id(0)
    before, wanted = sums_of_tiles(missing, tile, tl.num_programs(0), SUM_BLOCK)
    if wanted > 0:
        rank = tile * BLOCK + tl.arange(0, BLOCK)
        lost = tl.load(fetch + rank, mask=rank < capacity, other=0) != 0
        row = tl.load(rows + rank, mask=lost, other=-1)
        enters = lost & has_row(generation, row, lost)
        member = enters.to(tl.int32)
        index = before + tl.cumsum(member, 0) - member
        number = tl.load(sweep)
        gets = enters & (index < number)
        place = tl.load(taken + index, mask=gets, other=0)
        old = tl.load(row_of_slot + place, mask=gets, other=-1)
        tl.store(slot_of_row + old, tl.full(old.shape, -1, tl.int32), mask=old >= 0)
        tl.store(row_of_slot + place, row, mask=gets)
        tl.store(slot_of_row + row, place, mask=gets)
        tl.store(slot + rank, place, mask=gets)
        if tile == 0:
            tl.store(hand, tl.load(sweep + 1))
