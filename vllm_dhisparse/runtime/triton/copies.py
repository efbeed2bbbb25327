"""Moving rows between host pages, the cache and staging: as bytes, or decoded to bfloat16."""

from math import gcd
from typing import Any

import torch

from vllm_dhisparse.kernels import shapes
from vllm_dhisparse.kernels.copies import publish_rows, restore_rows, retrieve_rows
from vllm_dhisparse.kernels.decoding import retrieve_decoded
from vllm_dhisparse.kernels.remapping import place_selections
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.plan import Plan
from vllm_dhisparse.runtime.restore import RestoredSpans
from vllm_dhisparse.runtime.row_format import DECODED_SIZE, is_decoding
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.span import Span
from vllm_dhisparse.runtime.tables import UNIT_ROWS


def publish(rows: torch.Tensor, host_rows: torch.Tensor, host: HostLayer) -> None:
    num_tokens = host_rows.numel()
    assert rows.shape == (num_tokens, host.pages.shape[2])
    assert rows.dtype == host.pages.dtype
    assert rows.stride(1) == 1
    if num_tokens == 0:
        return
    shape = _row_shape(host.pages, rows)
    publish_rows[(-(-num_tokens // shape["BLOCK_ROWS"]),)](
        rows.data_ptr(),
        host_rows,
        host.chunk_addresses,
        num_tokens,
        rows.stride(0) * rows.itemsize,
        host.chunk_rows,
        **shape,
    )


def restore(
    spans: RestoredSpans,
    index_group: int,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
) -> None:
    _check_layer(slab, host)
    if not len(spans.units):
        return
    absent = spans.absent.view(torch.uint8)[:, index_group]
    shape = _row_shape(host.pages, slab)
    shape["BLOCK_ROWS"] = min(shape["BLOCK_ROWS"], UNIT_ROWS)
    restore_rows[(len(spans.units), UNIT_ROWS // shape["BLOCK_ROWS"])](
        spans.units,
        spans.first_host_rows,
        absent,
        unit_blocks,
        host.chunk_addresses,
        slab.data_ptr(),
        host.chunk_rows,
        absent.stride(0),
        unit_blocks.stride(0),
        slab.stride(0) * slab.itemsize,
        slab.stride(1) * slab.itemsize,
        UNIT_ROWS=UNIT_ROWS,
        **shape,
    )


def retrieve(
    plan: Plan,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    staging: torch.Tensor,
) -> torch.Tensor:
    capacity = plan.union.numel()
    assert capacity <= staging.shape[0]
    assert staging.is_contiguous()
    if is_decoding(slab, staging):
        _retrieve_decoded(plan, slab, unit_blocks, host, staging)
    else:
        _retrieve(plan, slab, unit_blocks, host, staging[None], None, None)
    return staging[:capacity][None]


def retrieve_in_place(
    plan: Plan,
    span: Span,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    scratch: Scratch,
) -> torch.Tensor:
    staging, remap = span.staging, plan.remap
    assert plan.union.numel() <= staging.shape[0] * UNIT_ROWS
    assert remap.is_contiguous()
    places = scratch.take("places", plan.union.numel(), dtype=torch.int32)
    index = scratch.take("index", *remap.shape, dtype=torch.int32)
    _retrieve(plan, slab, unit_blocks, host, staging, span, places)
    if remap.numel():
        place_selections[(-(-remap.numel() // shapes.SELECTIONS),)](
            remap, places, index, remap.numel(), BLOCK=shapes.SELECTIONS
        )
    return index


def _retrieve(
    plan: Plan,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    staging: torch.Tensor,
    span: Span | None,
    places: torch.Tensor | None,
) -> None:
    _check_layer(slab, host)
    capacity = plan.union.numel()
    assert staging.dtype == slab.dtype
    assert staging.stride()[1:] == (slab.shape[2], 1)
    if capacity == 0:
        return
    shape = _row_shape(host.pages, slab, staging)
    retrieve_rows[(-(-capacity // shape["BLOCK_ROWS"]),)](
        plan.union,
        plan.slot,
        plan.fetch.view(torch.uint8),
        unit_blocks,
        host.chunk_addresses,
        plan.slot if places is None else places,  # not touched
        slab.data_ptr(),
        staging.data_ptr(),
        capacity,
        0 if span is None else span.slab_first,
        0 if span is None else span.staging_first,
        host.chunk_rows,
        unit_blocks.stride(0),
        slab.stride(0) * slab.itemsize,
        slab.stride(1) * slab.itemsize,
        0 if span is None else (staging.stride(0) - UNIT_ROWS * slab.shape[2]) * slab.itemsize,
        0 if span is None else span.block_rows,
        UNIT_ROWS=UNIT_ROWS,
        HITS_IN_PLACE=span is not None,
        **shape,
    )


def _retrieve_decoded(
    plan: Plan,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    staging: torch.Tensor,
) -> None:
    _check_layer(slab, host)
    capacity = plan.union.numel()
    assert staging.shape[1] == DECODED_SIZE
    assert _alignment(host.pages, slab, staging) == 16, "rows are not on 16-byte boundaries"
    if capacity == 0:
        return
    retrieve_decoded[(-(-capacity // shapes.DECODED_ROWS),)](
        plan.union,
        plan.slot,
        plan.fetch.view(torch.uint8),
        unit_blocks,
        host.chunk_addresses,
        slab.data_ptr(),
        staging.view(torch.uint16),
        capacity,
        host.chunk_rows,
        unit_blocks.stride(0),
        slab.stride(0) * slab.itemsize,
        slab.stride(1) * slab.itemsize,
        UNIT_ROWS=UNIT_ROWS,
        BLOCK_ROWS=shapes.DECODED_ROWS,
    )


def _check_layer(slab: torch.Tensor, host: HostLayer) -> None:
    assert slab.dtype == host.pages.dtype
    assert slab.shape[2] == host.pages.shape[2]
    assert slab.stride(2) == 1
    assert slab.shape[1] >= UNIT_ROWS


def _alignment(*tensors: torch.Tensor) -> int:
    """Return what divides the address of every row, at most 16."""
    strides = [s * t.itemsize for t in tensors for s in (*t.stride()[:-1], t.shape[-1])]
    # A layer's chunks and the device's view of them start on pages of the operating system.
    return gcd(16, *strides, *(tensor.data_ptr() for tensor in tensors))


def _row_shape(pages: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    """Return how kernels copy a row: by which elements, how many, and how many at once."""
    row_bytes = pages.shape[2] * pages.itemsize
    alignment = _alignment(pages, *others)
    size = 4 if alignment % 4 == 0 else 1
    block, block_rows = shapes.copy_block(row_bytes // size)
    return {
        "ROW_BYTES": row_bytes,
        "ELEMENT": shapes.ELEMENTS[size],
        "ALIGNMENT": alignment,
        "WIDTH": row_bytes // size,
        "BLOCK": block,
        "BLOCK_ROWS": block_rows,
    }
