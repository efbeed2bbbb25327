"""Sparse MLA over rows by index, the keys of a query split over programs, then merged."""

import triton
import triton.language as tl


@triton.jit
def _load(base, offset, mask, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Load values of rows; the block is wider than a row's part unless sizes are equal."""
    if BLOCK == SIZE:
        return tl.load(base + offset, mask=mask, other=0.0)
    return tl.load(base + offset, mask=mask & (offset < SIZE), other=0.0)


@triton.jit
def attend_split(
    query,  # [num_tokens, num_heads, row_size], strided
    rows,  # [num_pages, page_rows, row_size], strided
    remap,  # [num_tokens, top_k] int32, -1 = no row
    out,  # [num_tokens, num_heads, splits, VALUE_SIZE]
    weights,  # out [num_tokens, num_heads, splits] float32: log2 of the sum of weights
    scale,  # of the scores, times log2(e)
    num_heads,
    top_k,
    token_stride,
    head_stride,
    row_stride,
    page_gap,  # between the end of a page and the next
    splits,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,  # 0 = nothing lies between two pages
    UPCAST: tl.constexpr,
):
    """Attention of one query and some heads over one share of its keys.

    The product of weights and values rounds the weights to the rows' type, as the CPU does.
    UPCAST takes products in float32: the interpreter knows no bfloat16.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = (head < num_heads)[:, None]
    value = tl.arange(0, BLOCK_VALUE)[None, :]
    rope = tl.arange(0, BLOCK_ROPE)[None, :]
    asked = query + token * token_stride + head[:, None] * head_stride
    query_value = _load(asked, value, is_head, BLOCK_VALUE, VALUE_SIZE)
    query_rope = _load(asked + VALUE_SIZE, rope, is_head, BLOCK_ROPE, ROPE_SIZE)
    if UPCAST:
        query_value = query_value.to(tl.float32)
        query_rope = query_rope.to(tl.float32)
    highest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    result = tl.zeros([BLOCK_HEADS, BLOCK_VALUE], tl.float32)
    share = tl.cdiv(tl.cdiv(top_k, splits), BLOCK_KEYS) * BLOCK_KEYS
    last = tl.minimum((split + 1) * share, top_k)
    for first in range(split * share, last, BLOCK_KEYS):
        rank = first + tl.arange(0, BLOCK_KEYS)
        index = tl.load(remap + token * top_k + rank, mask=rank < last, other=-1)
        real = index >= 0
        row = rows + index.to(tl.int64) * row_stride
        if PAGE_ROWS > 0:
            row += (index // PAGE_ROWS).to(tl.int64) * page_gap
        row = row[:, None]
        key_value = _load(row, value, real[:, None], BLOCK_VALUE, VALUE_SIZE)
        key_rope = _load(row + VALUE_SIZE, rope, real[:, None], BLOCK_ROPE, ROPE_SIZE)
        if UPCAST:
            key_value = key_value.to(tl.float32)
            key_rope = key_rope.to(tl.float32)
            score = tl.dot(query_value, tl.trans(key_value), input_precision="ieee")
            score = tl.dot(query_rope, tl.trans(key_rope), score, input_precision="ieee")
        else:
            score = tl.dot(query_value, tl.trans(key_value))
            score = tl.dot(query_rope, tl.trans(key_rope), score)
        score = tl.where(real[None, :], score * scale, float("-inf"))
        above = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weight, 1)
        result = result * shrink[:, None]
        weight = weight.to(rows.dtype.element_ty)
        if UPCAST:
            result = tl.dot(weight.to(tl.float32), key_value, result, input_precision="ieee")
        else:
            result = tl.dot(weight, key_value, result)
        highest = above
    some = tl.where(total > 0, total, 1.0)
    cell = (token * num_heads + head) * splits + split
    target = out + cell[:, None] * VALUE_SIZE + value
    mean = (result / some[:, None]).to(out.dtype.element_ty)
    tl.store(target, mean, mask=is_head & (value < VALUE_SIZE))
    tl.store(
        weights + cell,
        tl.where(total > 0, highest + tl.log2(some), float("-inf")),
        mask=head < num_heads,
    )


@triton.jit
def merge_splits(
    parts,  # [num_tokens * num_heads, splits, VALUE_SIZE] float32
    weights,  # [num_tokens * num_heads, splits] float32
    out,  # [num_tokens * num_heads, VALUE_SIZE]
    splits,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Mean of the parts, by their weights; zero where no part has any."""
    cell = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    value = tl.arange(0, BLOCK_VALUE)
    is_split = split < splits
    is_value = value < VALUE_SIZE
    weight = tl.load(weights + cell * splits + split, mask=is_split, other=float("-inf"))
    highest = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(share, 0)
    part = tl.load(
        parts + (cell * splits + split)[:, None] * VALUE_SIZE + value[None, :],
        mask=is_split[:, None] & is_value[None, :],
        other=0.0,
    )
    result = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + cell * VALUE_SIZE + value, result.to(out.dtype.element_ty), mask=is_value)
