"""A layer's slab and staging as one tensor, so that one index reaches rows in both.

Attention kernels take one base and int32 indices. The base is the lower of the two; what
lies between them belongs to others, and no index points there.
"""

import ctypes
from typing import NamedTuple

import torch

from vllm_dhisparse.runtime.tables import UNIT_ROWS


class Span(NamedTuple):
    """What reaches slab and staging of one layer.

    ``rows``: [pages, page_rows, row_size] - from the base on, as ``ops.attend`` takes them;
    ``staging``: [pages, UNIT_ROWS, row_size] - any stride between pages; row ``i`` of staging
    is row ``staging_first + i`` of ``rows``;
    ``slab_first``: row of ``rows`` that is row 0 of block 0, whose next block starts
    ``block_rows`` rows later.
    """

    rows: torch.Tensor
    staging: torch.Tensor
    slab_first: int
    staging_first: int
    block_rows: int


def staging_bytes(staging_rows: int, row_bytes: int, block_bytes: int) -> int:
    """Return the memory that staging needs, to be reached with any slab of such blocks."""
    step = _step_bytes(row_bytes, block_bytes)
    return -(-staging_rows // UNIT_ROWS) * max(step, UNIT_ROWS * row_bytes) + step


def span(slab: torch.Tensor, memory: torch.Tensor, staging_rows: int) -> Span:
    """Return the span of a layer.

    Args:
        slab: [num_blocks, UNIT_ROWS, row_size] - its KV cache, any stride between blocks.
        memory: [n] uint8 - of ``staging_bytes``, for all layers in turn.
        staging_rows: rows of staging.

    Raises:
        ValueError: an int32 index cannot reach from the one to the other.

    """
    num_blocks, block_rows, row_size = slab.shape
    assert block_rows == UNIT_ROWS
    assert slab.stride()[1:] == (row_size, 1)
    row_bytes, block_bytes = row_size * slab.itemsize, slab.stride(0) * slab.itemsize
    step = _step_bytes(row_bytes, block_bytes)
    is_flat = step == row_bytes
    step_rows = 1 if is_flat else UNIT_ROWS
    block_rows = block_bytes // row_bytes if is_flat else UNIT_ROWS
    shift = (slab.data_ptr() - memory.data_ptr()) % step
    staging_start = memory.data_ptr() + shift
    base = min(slab.data_ptr(), staging_start)
    slab_first = (slab.data_ptr() - base) // step * step_rows
    staging_first = (staging_start - base) // step * step_rows
    last = max(slab_first + num_blocks * block_rows, staging_first + staging_rows)
    num_rows = -(-last // UNIT_ROWS) * UNIT_ROWS
    if num_rows >= 2**31:
        raise ValueError(
            f"KV cache and staging lie {abs(slab.data_ptr() - staging_start)} bytes apart, "
            "further than an index reaches"
        )
    whole = _memory(base, num_rows // step_rows * step, slab.device).view(slab.dtype)
    page_size = max(step, UNIT_ROWS * row_bytes) // slab.itemsize
    page_strides = (page_size, row_size, 1)
    if is_flat:
        rows = whole.view(1, num_rows, row_size)
    else:
        rows = whole.as_strided((num_rows // UNIT_ROWS, UNIT_ROWS, row_size), page_strides)
    staging_shape = (-(-staging_rows // UNIT_ROWS), UNIT_ROWS, row_size)
    staging = memory[shift : memory.numel() - step + shift].view(slab.dtype)
    return Span(
        rows,
        staging.as_strided(staging_shape, page_strides),
        slab_first,
        staging_first,
        block_rows,
    )


def _step_bytes(row_bytes: int, block_bytes: int) -> int:
    """Return the distance of places with whole numbers: a row where blocks are whole rows."""
    return block_bytes if block_bytes % row_bytes else row_bytes


class _Foreign:
    """Memory of the device for torch, by numba's and CuPy's protocol."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _memory(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory as [num_bytes] uint8; it is not kept alive, nor looked at."""
    if device.type == "cpu":
        return torch.frombuffer(
            (ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8
        )
    return torch.as_tensor(_Foreign(address, num_bytes), device=device)
