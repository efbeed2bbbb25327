"""Slabs and staging that one index reaches."""

import torch

from vllm_dhisparse.runtime.span import Span, span, staging_bytes
from vllm_dhisparse.runtime.tables import UNIT_ROWS


def slab_and_span(
    num_blocks: int,
    row_size: int,
    dtype: torch.dtype,
    block_bytes: int,
    staging_rows: int,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, Span]:
    """Return a slab of zeros and its span.

    On a device they are two allocations, as in the product. The host's may lie too far apart,
    so there they are parts of one, staging behind the slab.
    """
    slab_bytes, row_bytes = num_blocks * block_bytes, row_size * dtype.itemsize
    needed = staging_bytes(staging_rows, row_bytes, block_bytes)
    if torch.device(device).type == "cpu":
        arena = torch.zeros(slab_bytes + needed + 16, dtype=torch.uint8)
        memory, staging = arena[:slab_bytes], arena[slab_bytes + -slab_bytes % 16 :][:needed]
    else:
        memory = torch.zeros(slab_bytes, dtype=torch.uint8, device=device)
        staging = torch.zeros(needed, dtype=torch.uint8, device=device)
    strides = (block_bytes // dtype.itemsize, row_size, 1)
    slab = memory.view(dtype).as_strided((num_blocks, UNIT_ROWS, row_size), strides)
    return slab, span(slab, staging, staging_rows)
