"""How old the rows of the cache are that a step finds, see ``core.clock``."""

import triton
import triton.language as tl

NOT_CACHED = tl.constexpr(255)


@triton.jit
def note_ages(
    row_of_slot,  # [num_slots] int32
    unit_state,  # [num_units] uint8
    age,  # [num_slots] uint8
    before,  # out [num_slots] uint8: age of rows in the cache, else NOT_CACHED
    counts,  # in, out [AGES] int64: rows in the cache by age
    num_slots,
    UNIT_ROWS: tl.constexpr,
    REQUIRED: tl.constexpr,
    AGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the ages that the step is about to change, and count them."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    row = tl.load(row_of_slot + slot, mask=inside, other=-1)
    state = tl.load(unit_state + slot // UNIT_ROWS, mask=inside, other=0)
    cached = inside & (row >= 0) & (state >= REQUIRED)
    old = tl.load(age + slot, mask=inside, other=0).to(tl.int32)
    tl.store(before + slot, tl.where(cached, old, NOT_CACHED).to(tl.uint8), mask=inside)
    for number in tl.static_range(AGES):
        count = tl.sum((cached & (old == number)).to(tl.int32))
        if count > 0:
            tl.atomic_add(counts + number, count.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["capacity"])
def count_hits(
    slot,  # [capacity] int32, -1 = none
    fetch,  # [capacity] uint8
    rows,  # [capacity] int32: host rows, -1 = none
    before,  # in, out [num_slots] uint8, from ``note_ages``: what is counted is struck off
    counts,  # in, out [AGES] int64: rows found in the cache by age
    capacity,
    AGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the rows of a plan that were in the cache before the step, in its first pass only."""
    rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(rows + rank, mask=rank < capacity, other=-1) >= 0
    place = tl.load(slot + rank, mask=real, other=-1)
    lost = tl.load(fetch + rank, mask=real, other=1) != 0
    found = real & (place >= 0) & (lost == 0)
    old = tl.load(before + place, mask=found, other=NOT_CACHED).to(tl.int32)
    tl.store(before + place, tl.full(place.shape, NOT_CACHED, tl.uint8), mask=found)
    for number in tl.static_range(AGES):
        count = tl.sum((old == number).to(tl.int32))
        if count > 0:
            tl.atomic_add(counts + number, count.to(tl.int64), sem="relaxed")
