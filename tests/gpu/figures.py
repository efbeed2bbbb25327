"""Benchmarks on the device; every figure also against what the hardware or torch does."""

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch
from checks import captured, synchronize
from spans import slab_and_span
from world import OPS, Batch, Sizes, make_pool

from vllm_dhisparse.runtime.plan import Plan
from vllm_dhisparse.runtime.tables import UNIT_ROWS

Figure = dict[str, Any]


def milliseconds(step: Callable[[], object], sizes: Sizes, device: str) -> float:
    """Return the median time of a step that has run before."""
    step()
    times = []
    for _ in range(sizes.repeats):
        synchronize(device)
        if device == "cpu":
            start = perf_counter()
            step()
            times.append(1e3 * (perf_counter() - start))
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        step()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)[len(times) // 2]


def gather(sizes: Sizes, device: str) -> Iterator[Figure]:
    """Random rows of pinned memory to staging, against one copy of as many bytes."""
    pages = sizes.pool_rows // 320
    for row_bytes in (576, 656, 1152):
        pool = make_pool(pages, row_bytes, torch.uint8, sizes, device)
        count = min(sizes.gathered_rows, pages * 320)
        rows = torch.randperm(pages * 320)[:count].sort().values.int().to(device)
        plan = Plan(0, 1, rows, torch.full_like(rows, -1), rows >= 0, rows[None])
        slab = torch.zeros(1, UNIT_ROWS, row_bytes, dtype=torch.uint8, device=device)
        column = torch.zeros(1, dtype=torch.int32, device=device)
        staging = torch.zeros(count, row_bytes, dtype=torch.uint8, device=device)
        source = pool.layer(0).view(-1, row_bytes)[:count]
        own = milliseconds(
            partial(OPS.retrieve, plan, slab, column, pool.host_layer(0), staging),
            sizes,
            device,
        )
        copy = milliseconds(
            partial(staging.copy_, source, non_blocking=True),
            sizes,
            device,
        )
        size = count * row_bytes / 1e6
        yield {
            "name": f"gather {count} rows of {row_bytes} B",
            "GB/s": size / own,
            "cudaMemcpy GB/s": size / copy,
            "ratio": copy / own,
        }
        pool.close()


def resolve_and_retrieve(sizes: Sizes, device: str) -> Iterator[Figure]:
    """A warm cache; times of a graph's replay, retrieve with all copied and in place."""
    for requests in sizes.requests:
        batch = Batch(requests, sizes, device)
        tables, queries, scratch = batch.tables(OPS, device), batch.queries(device), batch.scratch()
        pool = make_pool(batch.table_sizes.num_pages, 576, torch.bfloat16, sizes, device)
        num_blocks, staging_rows = batch.table_sizes.num_blocks, len(batch.owner) * sizes.top_k
        slab, span = slab_and_span(num_blocks, 576, torch.bfloat16, 66 * 1152, staging_rows, device)
        staging = torch.zeros(staging_rows, 576, dtype=torch.bfloat16, device=device)
        column, layer = tables.unit_blocks[:, 0], pool.host_layer(0)
        selections = [batch.select().to(device) for _ in range(4)]
        selected = selections[0].clone()
        held: dict[str, Any] = {}

        def resolve(
            selected=selected,
            queries=queries,
            tables=tables,
            rows=staging_rows,
            scratch=scratch,
            held=held,
        ) -> None:
            held["found"] = OPS.resolve(selected, queries, tables, 0, rows, scratch)

        replay = captured(resolve, device)
        for chosen in selections:
            selected.copy_(chosen)
            replay()
        own = milliseconds(replay, sizes, device)
        keys = (batch.owner.to(device)[:, None].long() * sizes.context + selected).flatten()
        unique = milliseconds(partial(torch.unique, keys), sizes, device)
        shape = f"{requests} requests x {len(batch.owner) // requests} x {sizes.top_k}"
        fetched = int(held["found"].fetched.sum())
        union = int((held["found"].plans[0].union >= 0).sum())
        yield {
            "name": f"resolve {shape}",
            "ms": own,
            "torch.unique ms": unique,
            "ratio": unique / own,
            "union rows": union,
        }
        selected.copy_(batch.select())
        replay()
        fetched = int(held["found"].fetched.sum())
        plan = held["found"].plans[0]
        copied = milliseconds(
            partial(OPS.retrieve, plan, slab, column, layer, staging),
            sizes,
            device,
        )
        in_place = milliseconds(
            partial(OPS.retrieve_in_place, plan, span, slab, column, layer, scratch),
            sizes,
            device,
        )
        yield {
            "name": f"retrieve {shape}, 1152 B",
            "ms": copied,
            "in place ms": in_place,
            "fetched rows": fetched,
            "fetched GB/s in place": fetched * 1152 / 1e6 / in_place,
        }
        pool.close()


def attention(sizes: Sizes, device: str) -> Iterator[Figure]:
    """Sparse MLA against a gather and two matrix products of torch."""
    for heads in sizes.heads:
        rows = torch.randn(1 << 15, 576, device=device).bfloat16()
        query = torch.randn(sizes.tokens, heads, 576, device=device).bfloat16()
        remap = torch.randint(0, 1 << 15, (sizes.tokens, sizes.top_k), device=device).int()
        scratch = Batch(1, sizes, device).scratch()

        def torch_attention(query=query, rows=rows, remap=remap) -> torch.Tensor:
            picked = rows[remap.long()]
            weights = torch.softmax(query @ picked.transpose(1, 2) * 0.04, -1, torch.float32)
            return weights.to(query.dtype) @ picked[..., :512]

        own = milliseconds(
            partial(OPS.attend, query, rows[None], remap, 0.04, 512, scratch),
            sizes,
            device,
        )
        other = milliseconds(torch_attention, sizes, device)
        flops = 2 * sizes.tokens * heads * sizes.top_k * (576 + 512)
        yield {
            "name": f"sparse MLA {sizes.tokens} tokens x {heads} heads x {sizes.top_k}",
            "ms": own,
            "torch ms": other,
            "ratio": other / own,
            "TFLOP/s": flops / own / 1e9,
        }
