"""Moving rows as bytes between host pages, the cache and staging."""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dhisparse.runtime.cpu.native import compiled, copy_bytes, prefetch
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.plan import Plan
from vllm_dhisparse.runtime.restore import RestoredSpans, copy_spans
from vllm_dhisparse.runtime.tables import UNIT_ROWS

_UNIT_ROWS = UNIT_ROWS
_AHEAD = 6  # rows between the prefetch of a row and its copy


def restore(
    spans: RestoredSpans,
    index_group: int,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
) -> None:
    copy_spans(spans, index_group, slab, unit_blocks, host.pages)


def publish(rows: torch.Tensor, host_rows: torch.Tensor, host: HostLayer) -> None:
    assert rows.dtype == host.pages.dtype
    assert rows.shape[1] == host.pages.shape[2]
    _publish(
        rows.data_ptr(),
        rows.stride(0) * rows.itemsize,
        rows.shape[1] * rows.itemsize,
        host_rows.numpy(),
        host.pages.data_ptr(),
    )


def retrieve(
    plan: Plan,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    staging: torch.Tensor,
) -> torch.Tensor:
    pages = host.pages
    assert slab.dtype == pages.dtype == staging.dtype
    assert slab.shape[2] == pages.shape[2] == staging.shape[1]
    assert slab.stride(2) == 1
    assert pages.is_contiguous()
    assert staging.is_contiguous()
    assert slab.shape[1] >= UNIT_ROWS
    num_rows = plan.union.numel()
    assert num_rows <= staging.shape[0]
    _retrieve(
        plan.union.numpy(),
        plan.slot.numpy(),
        plan.fetch.view(torch.uint8).numpy(),
        unit_blocks.numpy(),
        slab.data_ptr(),
        slab.stride(0) * slab.itemsize,
        slab.stride(1) * slab.itemsize,
        pages.data_ptr(),
        staging.data_ptr(),
        staging.shape[1] * staging.itemsize,
    )
    return staging[:num_rows][None]


@compiled
def _publish(
    source: int, stride: int, row_bytes: int, host_rows: NDArray[np.int64], host: int
) -> None:
    for token in range(host_rows.size):
        if host_rows[token] >= 0:
            copy_bytes(host + host_rows[token] * row_bytes, source + token * stride, row_bytes)


@compiled
def _retrieve(
    union: NDArray[np.int32],
    slot: NDArray[np.int32],
    fetch: NDArray[np.uint8],
    unit_blocks: NDArray[np.int32],
    slab: int,
    block_stride: int,
    row_stride: int,
    host: int,
    staging: int,
    row_bytes: int,
) -> None:
    size = union.size
    for index in range(-_AHEAD, size):
        ahead = index + _AHEAD
        if ahead < size:
            if fetch[ahead]:
                source = host + np.int64(union[ahead]) * row_bytes
            else:
                block = np.int64(unit_blocks[slot[ahead] // _UNIT_ROWS])
                offset = slot[ahead] % _UNIT_ROWS
                source = slab + block * block_stride + offset * row_stride
            for line in range(0, row_bytes, 64):
                prefetch(source + line)
        if index < 0:
            continue
        place = np.int64(0)
        if slot[index] >= 0:
            block = np.int64(unit_blocks[slot[index] // _UNIT_ROWS])
            place = slab + block * block_stride + (slot[index] % _UNIT_ROWS) * row_stride
        target = staging + index * row_bytes
        if fetch[index]:
            source = host + np.int64(union[index]) * row_bytes
            copy_bytes(target, source, row_bytes)
            if slot[index] >= 0:
                copy_bytes(place, source, row_bytes)
        else:
            copy_bytes(target, place, row_bytes)
