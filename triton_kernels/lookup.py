"""Where the rows of a union are on the device."""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.bits import has_row, rank_of


@triton.jit(do_not_specialize=["capacity"])
def look_up(
    rows,  # [capacity] int32: host rows, -1 = none
    generation,  # [num_words] int32: rows that enter the cache
    slot_of_row,  # [host_rows] int32
    unit_state,  # [num_units] uint8
    age,  # in, out [num_slots] uint8
    slot,  # out [capacity] int32
    tier,  # out [capacity] uint8
    fetch,  # out [capacity] uint8
    missing,  # out [tiles] int32: rows of each tile that are missing and enter
    fetched,  # in, out [phases] int64
    capacity,
    UNIT_ROWS: tl.constexpr,
    MAX_AGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find slot and tier of each row, count what is missing, and refresh what is hit."""
    tile = tl.program_id(0)
    rank = tile * BLOCK + tl.arange(0, BLOCK)
    inside = rank < capacity
    row = tl.load(rows + rank, mask=inside, other=-1)
    real = row >= 0
    place = tl.load(slot_of_row + row, mask=real, other=-1)
    found = place >= 0
    kept = has_row(generation, row, real)
    state = tl.load(unit_state + place // UNIT_ROWS, mask=found, other=0)
    tl.store(slot + rank, place, mask=inside)
    tl.store(tier + rank, state, mask=inside)
    lost = real & (place < 0)
    tl.store(fetch + rank, lost.to(tl.uint8), mask=inside)
    hit = found & kept
    tl.store(age + place, tl.full(place.shape, MAX_AGE, tl.uint8), mask=hit)
    enters = tl.sum((lost & kept).to(tl.int32))
    passes = tl.sum(lost.to(tl.int32)) - enters
    tl.store(missing + tile, enters)
    if enters > 0:
        tl.atomic_add(fetched, enters.to(tl.int64), sem="relaxed")
    if passes > 0:
        tl.atomic_add(fetched + 1, passes.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["capacity"])
def pick_rows(
    rows,  # [capacity] int32: host rows of one pass, -1 = none
    generation,  # [num_words] int32: rows that enter the cache
    step_union,  # [num_words] int32
    step_ranks,  # [num_words] int32
    step_slot,  # of each row of the step's union, as the next two
    step_tier,
    pending,  # in, out uint8: rows that no pass has brought into their slot
    slot,  # out [capacity], as the next two
    tier,
    fetch,
    fetched,  # in, out [phases] int64
    capacity,
    BLOCK: tl.constexpr,
):
    """Look up the rows of one pass among those of the step."""
    rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rank < capacity
    row = tl.load(rows + rank, mask=inside, other=-1)
    real = row >= 0
    index = rank_of(step_union, step_ranks, row, real)
    place = tl.load(step_slot + index, mask=real, other=-1)
    waits = tl.load(pending + index, mask=real, other=0)
    tl.store(slot + rank, place, mask=inside)
    tl.store(tier + rank, tl.load(step_tier + index, mask=real, other=0), mask=inside)
    tl.store(fetch + rank, waits, mask=inside)
    tl.store(pending + index, tl.zeros(row.shape, tl.uint8), mask=place >= 0)
    now = waits != 0
    kept = has_row(generation, row, real)
    enters = tl.sum((now & kept).to(tl.int32))
    tl.atomic_add(fetched, enters.to(tl.int64), sem="relaxed")
    tl.atomic_add(fetched + 1, (tl.sum(now.to(tl.int32)) - enters).to(tl.int64), sem="relaxed")
