"""Sparse MLA in shares of a fixed number of keys, merged afterwards.

Whatever else is in the batch, and wherever the rows lie, a query's result has the same
bits: the shares of its keys depend on ``top_k`` alone.
"""

from math import e as euler
from math import log2

import torch

from vllm_dhisparse.kernels import shapes
from vllm_dhisparse.kernels.attention import attend_split, merge_splits
from vllm_dhisparse.runtime.scratch import Scratch

_LEAST_DOT = 16  # what a matrix product of Triton takes
_MAX_PART_VALUES = 1 << 25  # 128 MiB of float32; more tokens are served in turns


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    value_size: int,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, _ = query.shape
    assert rows.dtype == query.dtype
    assert shapes.INTERPRETED or query.dtype == torch.bfloat16, "products are of bfloat16"
    assert rows.stride(2) == query.stride(2) == 1
    assert remap.is_contiguous()
    out = query.new_empty(num_tokens, num_heads, value_size)
    splits = max(1, -(-remap.shape[1] // shapes.SPLIT_KEYS))
    turn = max(1, _MAX_PART_VALUES // (num_heads * splits * value_size))
    scratch = scratch or Scratch(query.device)
    for first in range(0, num_tokens, turn):
        part = slice(first, first + turn)
        _serve(query[part], rows, remap[part], scale, out[part], splits, scratch)
    return out


def _serve(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    splits: int,
    scratch: Scratch,
) -> None:
    num_tokens, num_heads, row_size = query.shape
    value_size, cells = out.shape[2], num_tokens * num_heads
    page_gap = rows.stride(0) - rows.shape[1] * rows.stride(1) if rows.shape[0] > 1 else 0
    parts = out
    if splits > 1:
        parts = scratch.take("parts", cells, splits, value_size, dtype=torch.float32)
    weights = scratch.take("part weights", cells, splits, dtype=torch.float32)
    block_value = max(_LEAST_DOT, shapes.next_power_of_two(value_size))
    attend_split[(num_tokens, -(-num_heads // shapes.HEADS), splits)](
        query,
        rows,
        remap,
        parts,
        weights,
        scale * log2(euler),
        num_heads,
        remap.shape[1],
        query.stride(0),
        query.stride(1),
        rows.stride(1),
        page_gap,
        splits,
        VALUE_SIZE=value_size,
        BLOCK_VALUE=block_value,
        ROPE_SIZE=row_size - value_size,
        BLOCK_ROPE=max(_LEAST_DOT, shapes.next_power_of_two(row_size - value_size)),
        BLOCK_HEADS=shapes.HEADS,
        BLOCK_KEYS=shapes.KEYS,
        PAGE_ROWS=rows.shape[1] if page_gap else 0,
        UPCAST=shapes.INTERPRETED,
        num_warps=shapes.ATTENTION_WARPS,
        num_stages=2,
    )
    if splits > 1:
        merge_splits[(cells,)](
            parts,
            weights,
            out,
            splits,
            VALUE_SIZE=value_size,
            BLOCK_VALUE=block_value,
            BLOCK_SPLITS=shapes.next_power_of_two(splits),
        )
