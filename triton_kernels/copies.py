"""Moving rows between host pages, the cache and staging."""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.addresses import copy_rows, host_addresses, slot_addresses


@triton.jit(do_not_specialize=["capacity", "slab_first", "staging_first"])
def retrieve_rows(
    rows,  # [capacity] int32: host rows, -1 = none
    slot,  # [capacity] int32
    fetch,  # [capacity] uint8
    unit_blocks,  # [num_units] int32, strided
    chunk_addresses,  # [chunks] int64
    places,  # out [capacity] int32: of rows in slab or staging, see ``runtime.span``
    slab,  # int64 address
    staging,  # int64 address
    capacity,
    slab_first,
    staging_first,
    chunk_rows,
    blocks_stride,
    block_bytes,
    slab_row_bytes,
    staging_page_gap,  # bytes between pages of UNIT_ROWS rows
    block_rows,
    UNIT_ROWS: tl.constexpr,
    HITS_IN_PLACE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Bring rows to staging: misses from the host, also into their slots, hits from slots.

    With HITS_IN_PLACE only what no slot holds goes to staging, and ``places`` is written.
    """
    rank = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(rows + rank, mask=rank < capacity, other=-1)
    real = row >= 0
    place = tl.load(slot + rank, mask=real, other=-1)
    lost = tl.load(fetch + rank, mask=real, other=0) != 0
    home = host_addresses(chunk_addresses, row, lost, chunk_rows, ROW_BYTES)
    cached = slot_addresses(
        slab, unit_blocks, place, place >= 0, blocks_stride, block_bytes, slab_row_bytes, UNIT_ROWS
    )
    source = tl.where(lost, home, cached)
    staged = staging + rank.to(tl.int64) * ROW_BYTES
    fresh = lost & (place >= 0)
    if HITS_IN_PLACE:
        block = tl.load(unit_blocks + place // UNIT_ROWS * blocks_stride, mask=place >= 0, other=0)
        in_slab = slab_first + block * block_rows + place % UNIT_ROWS
        tl.store(places + rank, tl.where(place >= 0, in_slab, staging_first + rank), mask=real)
        staged += (rank // UNIT_ROWS).to(tl.int64) * staging_page_gap
        staged = tl.where(fresh, cached, staged)
        fresh = fresh & (rank < 0)
        real = lost
    copy_rows(source, staged, cached, real, fresh, ELEMENT, ALIGNMENT, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["num_tokens"])
def publish_rows(
    rows,  # int64 address of [num_tokens] rows, strided
    host_rows,  # [num_tokens] int64, -1 = padding
    chunk_addresses,  # [chunks] int64
    num_tokens,
    row_stride,
    chunk_rows,
    ROW_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Copy written rows to their host rows."""
    token = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(host_rows + token, mask=token < num_tokens, other=-1)
    real = row >= 0
    home = host_addresses(chunk_addresses, row, real, chunk_rows, ROW_BYTES)
    source = rows + token.to(tl.int64) * row_stride
    copy_rows(source, home, home, real, row < -1, ELEMENT, ALIGNMENT, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["units", "first_rows"])
def restore_rows(
    units,  # [num_spans] int32
    first_rows,  # [num_spans] int32
    absent,  # [num_spans, UNIT_ROWS] uint8 of one index group, strided
    unit_blocks,  # [num_units] int32, strided
    chunk_addresses,  # [chunks] int64
    slab,  # int64 address
    chunk_rows,
    absent_stride,
    blocks_stride,
    block_bytes,
    slab_row_bytes,
    UNIT_ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Copy the rows of spans into the blocks of their units, unless a unit is dead again."""
    span = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = tl.load(units + span)
    block = tl.load(unit_blocks + (unit + offset * 0) * blocks_stride)
    enters = (tl.load(absent + span * absent_stride + offset) != 0) & (block >= 0)
    row = tl.load(first_rows + span) + offset
    home = host_addresses(chunk_addresses, row, enters, chunk_rows, ROW_BYTES)
    place = slot_addresses(
        slab,
        unit_blocks,
        unit * UNIT_ROWS + offset,
        enters,
        blocks_stride,
        block_bytes,
        slab_row_bytes,
        UNIT_ROWS,
    )
    copy_rows(home, place, place, enters, row < 0, ELEMENT, ALIGNMENT, WIDTH, BLOCK)
