"""What a worker on CUDA proves before its first step; cheap, and loud where it fails."""

from typing import Any

import torch

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.layers import RowAttention
from vllm_dhisparse.integration.worker_state import WorkerState
from vllm_dhisparse.runtime.plan import SparseQuery, fetch_plan
from vllm_dhisparse.runtime.row_format import decode

_PROBE_ROWS = 256
_TOLERANCE = 2e-2  # of bfloat16 answers


def check_views(layers: dict[str, Any], sizes: Geometry) -> None:
    """Compare what vLLM bound to the layers with the page plan.

    Raises:
        RuntimeError: the cache of a layer has another layout than was planned.

    """
    for name, layer in layers.items():
        cache = layer.kv_cache
        expected = {
            "dtype": (cache.dtype, sizes.dtype),
            "rows of a block": (cache.shape[1], UNIT_ROWS),
            "values of a row": (cache.shape[2], sizes.row_size),
            "stride of a value": (cache.stride(2), 1),
            "stride of a row": (cache.stride(1), sizes.row_size),
            "bytes between blocks": (cache.stride(0) * cache.itemsize, sizes.plan.page_bytes),
            "alignment": (cache.data_ptr() % 16, 0),
        }
        for what, (found, planned) in expected.items():
            if found != planned:
                raise RuntimeError(
                    f"{what} in the KV cache of {name}: vLLM gave {found}, planned was {planned}. "
                    "The layout must be LBNHC; unset VLLM_KV_CACHE_LAYOUT"
                )


def check_attention(attention: RowAttention, query: torch.Tensor, dtype: torch.dtype) -> None:
    """Attend to random rows, and compare with plain torch; in a graph too, where there are any.

    Args:
        attention: of the worker.
        query: [tokens, heads, row values] - buffer for queries, left zero.
        dtype: of the rows that it reads; uint8 means fp8_ds_mla rows.

    Raises:
        RuntimeError: the answer is another one.

    """
    stored = _random_rows(_PROBE_ROWS, query, dtype)
    remap = torch.full((3, 128), -1, dtype=torch.int32)
    remap[0, :3] = torch.tensor([0, _PROBE_ROWS - 1, 17])
    remap[1] = torch.randint(_PROBE_ROWS, (128,), generator=torch.Generator().manual_seed(1))
    remap[2, 5:9] = 42  # the same row more than once, after nothing
    picked = stored[remap.clamp(min=0).long().to(stored.device)]
    _check_answer(attention, query, stored[None], remap, picked)


def check_reach(worker: WorkerState, query: torch.Tensor) -> None:
    """Attend to the last rows of KV cache and staging by one index, in every layer.

    Raises:
        RuntimeError: the answer is another one.

    """
    for place in worker.places:
        if (span := place.span) is None:
            continue
        ends = place.kv_cache[-1, -1:], span.staging[-1, -1:]
        stored = _random_rows(2, query, place.kv_cache.dtype)
        for end, row in zip(ends, stored, strict=True):
            end.copy_(row)
        remap = torch.full((1, 128), -1, dtype=torch.int32)
        in_slab = span.slab_first + (len(place.kv_cache) - 1) * span.block_rows + UNIT_ROWS - 1
        remap[0, 1:3] = torch.tensor([in_slab, span.staging_first + worker.sizes.staging_rows - 1])
        order = torch.zeros(1, 128, dtype=torch.long)
        order[0, 2] = 1
        picked = stored[order.to(stored.device)]
        _check_answer(worker.attention, query, span.rows, remap, picked)
        for end in ends:
            end.zero_()


def _check_answer(
    attention: RowAttention,
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    picked: torch.Tensor,
) -> None:
    """Compare attention with plain torch over ``picked``, the rows that ``remap`` names."""
    generator, device = torch.Generator().manual_seed(0), query.device
    remap = remap.to(device)
    asked = query[: len(remap)]
    asked.copy_(torch.randn(asked.shape, generator=generator))
    try:
        scale, value_size = query.shape[2] ** -0.5, 512
        probe = SparseQuery(asked, rows, remap, scale, value_size)
        found = attention.attend(probe, _ProbeStep())
        if picked.dtype == torch.uint8:
            picked = decode(picked.flatten(0, 1)).view(*remap.shape, -1)
        plain = picked.float().masked_fill(remap[..., None] < 0, 0.0)
        scores = torch.einsum("thd,tkd->thk", asked.float(), plain)
        scores = (scores * scale).masked_fill(remap[:, None] < 0, float("-inf"))
        weights = torch.softmax(scores, -1)
        expected = torch.einsum("thk,tkd->thd", weights, plain[..., :value_size])
        error = (found.float() - expected).abs().max() / expected.abs().max()
        if not error <= _TOLERANCE:  # NaN is an error too
            raise RuntimeError(
                f"sparse attention by {type(attention).__name__} is off by {float(error):.3g} of "
                f"the largest value on {device}; please report this with your GPU and driver"
            )
        if device.type == "cuda":
            _check_replay(attention, probe, found)
    finally:
        asked.zero_()


def _random_rows(count: int, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(count, query.shape[2], generator=torch.Generator().manual_seed(2))
    return (_encoded(rows) if dtype == torch.uint8 else rows.to(dtype)).to(query.device)


class _ProbeStep:
    """In the place of a step's metadata."""

    def __init__(self) -> None:
        self.schedules: dict[tuple[int, ...], Any] = {}


def _check_replay(attention: RowAttention, probe: SparseQuery, eager: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(probe, _ProbeStep())
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(out, eager):
        raise RuntimeError(
            f"sparse attention by {type(attention).__name__} differs when a graph replays it; "
            "use --enforce-eager and please report this with your GPU and driver"
        )


def check_host_pool(worker: WorkerState) -> None:
    """Bring the first and the last row of every pinned chunk to the device, and compare.

    Raises:
        RuntimeError: the device reads something else than the host wrote.

    """
    pool, place_of = worker.pool, worker.places
    for chunk in pool.chunks:
        pages = pool.layer(chunk.layer)[chunk.first_page : chunk.first_page + chunk.num_pages]
        page_rows = pages.shape[1]
        rows = pages.flatten(0, 1)
        ends = torch.tensor([0, len(rows) - 1])
        rows[ends] = _pattern(rows[ends], chunk.layer)
        place = place_of[chunk.layer]
        plan = fetch_plan(ends + chunk.first_page * page_rows, worker.staging.device)
        unit_blocks = worker.tables.unit_blocks[:, place.latent_group]
        found = worker.ops.retrieve(plan, place.kv_cache, unit_blocks, place.host, worker.staging)
        expected = rows[ends]
        if worker.staging.dtype != expected.dtype:
            expected = decode(expected)
        same = torch.equal(found[0, :2].cpu().view(torch.uint8), expected.view(torch.uint8))
        rows[ends] = 0
        worker.staging[:2].zero_()
        if not same:
            raise RuntimeError(
                f"the device does not read pinned host memory as the host wrote it (layer "
                f"{chunk.layer}, pages from {chunk.first_page} on); check the driver, and "
                "containers or virtual machines that remap memory"
            )


def _pattern(rows: torch.Tensor, layer: int) -> torch.Tensor:
    """Bytes that are numbers in every row format, and differ between places."""
    places = torch.arange(rows.view(torch.uint8).numel()).view(len(rows), -1)
    return ((places + 37 * layer) % 61).to(torch.uint8).view(rows.dtype)


def _encoded(rows: torch.Tensor) -> torch.Tensor:
    """fp8_ds_mla rows whose scales are 1: [n, 656] uint8 of [n, 576]."""
    latent = rows[:, :512].to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.ones(len(rows), 4).view(torch.uint8)
    rope = rows[:, 512:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([latent, scales, rope], dim=1)
