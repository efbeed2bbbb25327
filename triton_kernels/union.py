"""Union of a batch's selections: bitmaps over host rows, tile sums, a sorted list.

Whatever the order of the atomics, the union is the same, and its rows come out sorted.
"""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.bits import bit_of, count_bits, sums_of_tiles
from vllm_dhisparse.kernels.errors import NO_HOST_PAGE_SELECTED, UNION_OVERFLOWS, report


@triton.jit(do_not_specialize=["size"])
def mark_selections(
    selected,  # [num_tokens, top_k] int32, strided
    request_of_token,  # [num_tokens] int32
    visible,  # [num_tokens] int32
    is_prefill,  # [num_requests] uint8
    block_table,  # [num_requests, table_width] int32, strided
    page_of_block,  # [num_blocks] int32
    rows,  # out [num_tokens, top_k] int32: host row, -1 = none
    marks,  # in, out [phases, num_words] int32: rows selected by requests of each phase
    errors,
    selected_stride,
    table_stride,
    table_width,
    num_blocks,
    page_rows,
    top_k,
    size,
    num_words,
    BLOCK: tl.constexpr,
):
    """Find the host row of each selected position, and mark it in the bitmap of its phase."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    token = index // top_k
    request = tl.load(request_of_token + token, mask=inside, other=-1).to(tl.int64)
    asks = request >= 0
    limit = tl.load(visible + token, mask=asks, other=0)
    phase = tl.load(is_prefill + request, mask=asks, other=0).to(tl.int64)
    place = token.to(tl.int64) * selected_stride + index % top_k
    position = tl.load(selected + place, mask=inside, other=-1)
    valid = asks & (position >= 0) & (position < limit)
    page_of_request = position // page_rows
    block = tl.load(
        block_table + request * table_stride + page_of_request,
        mask=valid & (page_of_request < table_width),
        other=-1,
    )
    known = (block >= 0) & (block < num_blocks)
    page = tl.load(page_of_block + block, mask=known, other=-1)
    found = valid & (page >= 0)
    report(errors, NO_HOST_PAGE_SELECTED, valid & (page < 0))
    row = tl.where(found, page * page_rows + position % page_rows, -1)
    tl.store(rows + index, row, mask=inside)
    word = marks + phase * num_words + (row >> 5)
    tl.atomic_or(word, bit_of(row & 31), mask=found, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "size"])
def mark_rows(
    rows,  # [size] int32: host row, -1 = none
    marks,  # in, out [num_words] int32
    size,
    BLOCK: tl.constexpr,
):
    """Mark rows that were found before."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < size, other=-1)
    tl.atomic_or(marks + (row >> 5), bit_of(row & 31), mask=row >= 0, sem="relaxed")


@triton.jit
def count_rows(
    marks,  # [PHASES, num_words] int32
    union,  # out [num_words] int32: rows marked in any phase
    counts,  # out [tiles] int32: rows of each tile of BLOCK words
    num_words,
    PHASES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Unite the bitmaps of all phases and count the rows of each tile."""
    tile = tl.program_id(0)
    word = tile * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    bits = tl.load(marks + word, mask=inside, other=0)
    for phase in tl.static_range(1, PHASES):
        bits |= tl.load(marks + phase * num_words + word, mask=inside, other=0)
    tl.store(union + word, bits, mask=inside)
    tl.store(counts + tile, tl.sum(count_bits(bits)))


@triton.jit(do_not_specialize=["capacity"])
def list_rows(
    union,  # [num_words] int32
    counts,  # [tiles] int32
    rows,  # in, out [capacity] int32: rows of the union, ascending; the rest stays
    rank_of_word,  # out [num_words] int32: rows of the union before each word
    errors,
    num_words,
    num_tiles,
    capacity,
    BLOCK: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """List the rows of a bitmap in order."""
    tile = tl.program_id(0)
    word = tile * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    bits = tl.load(union + word, mask=inside, other=0)
    before, _ = sums_of_tiles(counts, tile, num_tiles, SUM_BLOCK)
    number = count_bits(bits)
    rank = before + tl.cumsum(number, 0) - number
    tl.store(rank_of_word + word, rank, mask=inside)
    # One row of every word at a time: words are sparse, and 32 lanes for each mostly idle.
    for _ in range(0, tl.max(number)):
        lowest = count_bits((bits & -bits) - 1)
        fits = rank < capacity
        tl.store(rows + rank, word * 32 + lowest, mask=(bits != 0) & fits)
        report(errors, UNION_OVERFLOWS, (bits != 0) & (rank >= capacity))
        rank += (bits != 0).to(tl.int32)
        bits = bits & (bits - 1)
