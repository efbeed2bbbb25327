"""Sparse MLA: each query gathers its rows and runs two matrix products over them.

One query at a time, so that its products have one shape, and its result the same bits,
whatever else is in the batch and wherever the rows are stored. Nothing is allocated
inside the loop: pages of fresh memory take longer than the softmax.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dhisparse.runtime.cpu.native import compiled, copy_bytes, prefetch
from vllm_dhisparse.runtime.scratch import Scratch

_AHEAD = 6  # rows between the prefetch of a row and its copy


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    value_size: int,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, row_size = query.shape
    top_k = remap.shape[1]
    assert rows.dtype == query.dtype
    assert rows.stride(2) == 1
    out = query.new_empty(num_tokens, num_heads, value_size)
    scratch = scratch or Scratch()
    picked = scratch.take(f"picked {rows.dtype}", top_k, row_size, dtype=rows.dtype)
    keys, values = picked.T, picked[:, :value_size]
    products, weights = scratch.take(f"weights {rows.dtype}", 2, num_heads, top_k, dtype=rows.dtype)
    scores, shares = scratch.take("scores", 2, num_heads, top_k, dtype=torch.float32)
    for asked, index, answer in zip(query, remap, out, strict=True):
        num_missing = gather(rows, index, picked)
        if num_missing == top_k:
            answer.zero_()
            continue
        torch.mm(asked, keys, out=products)
        scores.copy_(products).mul_(scale)
        if num_missing:
            scores.masked_fill_(index < 0, float("-inf"))
        torch.softmax(scores, dim=-1, out=shares)
        torch.mm(weights.copy_(shares), values, out=answer)
    return out


def gather(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> int:
    """Copy rows by index; an index of -1 gives zeros. Returns how many those are.

    Args:
        rows: [num_pages, page_rows, row_size] - any stride between pages.
        index: [n] int32 - ``page * page_rows + offset``, -1 = no row.
        out: [n, row_size], contiguous.

    """
    return _gather(
        rows.data_ptr(),
        rows.stride(0) * rows.itemsize,
        rows.stride(1) * rows.itemsize,
        rows.shape[1],
        index.numpy(),
        out.data_ptr(),
        out.view(torch.uint8).numpy(),
    )


@compiled
def _gather(
    rows: int,
    page_stride: int,
    row_stride: int,
    page_rows: int,
    index: NDArray[np.int32],
    out_address: int,
    out: NDArray[np.uint8],
) -> int:
    size, row_bytes, num_missing = index.size, out.shape[1], 0
    whole = page_stride == page_rows * row_stride
    for rank in range(-_AHEAD, size):
        ahead = rank + _AHEAD
        if ahead < size and index[ahead] >= 0:
            source = _address(rows, page_stride, row_stride, page_rows, whole, index[ahead])
            for line in range(0, row_bytes, 64):
                prefetch(source + line)
        if rank < 0:
            continue
        if index[rank] < 0:
            num_missing += 1
            out[rank] = 0
        else:
            source = _address(rows, page_stride, row_stride, page_rows, whole, index[rank])
            copy_bytes(out_address + rank * row_bytes, source, row_bytes)
    return num_missing


@compiled
def _address(
    rows: int, page_stride: int, row_stride: int, page_rows: int, whole: bool, index: int
) -> int:
    if whole:
        return rows + int(index) * row_stride
    return rows + int(index) // page_rows * page_stride + int(index) % page_rows * row_stride
