"""Figures of the CPU data plane: resolve, gather, attend."""

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from harness import Figure, Sizes, benchmark, figure, medians
from selections import steps

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitState
from vllm_dhisparse.runtime.cpu.attention import gather
from vllm_dhisparse.runtime.cpu.native import compiled, prefetch
from vllm_dhisparse.runtime.cpu.resolution import _Resolver
from vllm_dhisparse.runtime.cpu.state import Int32s
from vllm_dhisparse.runtime.cpu.union import list_rows
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.ops import data_plane
from vllm_dhisparse.runtime.plan import Queries, Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes

ROW_SIZE, VALUE_SIZE = 576, 512
QUERIES = 4  # of each request: one token and three drafts
PAGE_ROWS = 320  # an indexer block of GLM-5.3, see core.page_plan
OPS = data_plane("cpu")

Item = TypeVar("Item")


class Load(NamedTuple):
    """A batch of decoding requests with a warm row cache."""

    tables: Tables
    queries: Queries
    selections: list[torch.Tensor]
    rows_of_unique: list[torch.Tensor]  # the same selections as int64 keys
    scratch: Scratch


def make_load(sizes: Sizes, requests: int, num_steps: int, shuffled: bool = False) -> Load:
    """Each request's pages in one run, or all pages shuffled."""
    blocks = -(-sizes.context // PAGE_ROWS)
    pages = requests * blocks
    units = requests * 2 * sizes.top_k // UNIT_ROWS
    tables = Tables(TableSizes(pages + units, units, pages, PAGE_ROWS, 1, 1))
    order = torch.arange(pages)
    if shuffled:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    bound = tuple(PageBound(page, block) for block, page in enumerate(order.tolist()))
    added = tuple(UnitAdded(unit, UnitState.OPTIONAL, (pages + unit,)) for unit in range(units))
    OPS.apply(StepCommands(0, bound + added), tables)
    owner = torch.arange(requests, dtype=torch.int32).repeat_interleave(QUERIES)
    asked = Queries(
        owner,
        torch.full_like(owner, sizes.context),
        torch.arange(pages, dtype=torch.int32).view(requests, blocks),
        torch.zeros(requests, dtype=torch.bool),
    )
    drawn = islice(steps(0, requests, QUERIES, sizes.context, sizes.top_k), num_steps)
    selections = [torch.from_numpy(step) for step in drawn]
    keys = [(owner[:, None].long() * sizes.context + step).flatten() for step in selections]
    return Load(tables, asked, selections, keys, Scratch())


def to_and_fro(items: list[Item]) -> Iterator[Item]:
    """Repeat a few steps without a jump from the last to the first."""
    return cycle(items + items[-2:0:-1])


def resolve_next(load: Load, selected: torch.Tensor) -> Resolution:
    return OPS.resolve(selected, load.queries, load.tables, 0, 1 << 20, load.scratch)


def least_work(load: Load, selected: torch.Tensor) -> None:
    resolver = _Resolver(selected, load.queries, load.tables, 0, load.scratch)
    num_rows = resolver._mark(0, len(selected), resolver.bitmaps, resolver.kept)
    found = resolver._take_rows("step", num_rows)
    list_rows(resolver.bitmaps.union, found.rows, resolver.bitmaps.rank_of_word)
    read_map(found.rows[:num_rows], resolver.cache.slot_of_row, resolver.cache.slot_of_row_address)
    resolver._plan(0, len(selected), found, resolver.bitmaps)


@compiled
def read_map(rows: Int32s, slot_of_row: Int32s, address: int) -> int:
    ahead, total = 400, 0
    for rank in range(rows.size):
        if rank + ahead < rows.size:
            prefetch(address + 4 * np.int64(rows[rank + ahead]))
        total += slot_of_row[rows[rank]]
    return total


@benchmark("resolve")
def resolve(sizes: Sizes) -> Iterator[Figure]:
    """Cold: ``torch.unique`` runs in between and leaves nothing of the tables in the caches.

    The floor is what no order of the work avoids: marking each selection and mapping it back,
    listing the rows of the union, and one look at the map for each of them. With 1 M selections
    and 0.4 M rows it was two thirds of resolve (2.7 of 3.9 ms on one core of an AMD EPYC), so
    this way of resolving does not come below 2 ms there.
    """
    for title, shuffled in (("pages in runs", False), ("pages shuffled", True)):
        load = make_load(sizes, sizes.requests, 6, shuffled)
        for selected in load.selections:
            last = resolve_next(load, selected)
        selections, keys = to_and_fro(load.selections), to_and_fro(load.rows_of_unique)
        own, unique = medians(
            lambda load=load, selections=selections: resolve_next(load, next(selections)),
            lambda keys=keys: torch.unique(next(keys)),
            repeats=sizes.least_repeats,
        )
        yield figure(f"resolve 128 x 4 x 2048, {title}, against torch.unique", own, "ms", unique)
        if not shuffled:
            (warm,) = medians(
                lambda load=load, selections=selections: resolve_next(load, next(selections)),
                repeats=sizes.least_repeats,
            )
            yield figure("resolve 128 x 4 x 2048, one step after the other", warm, "ms")
            selections = to_and_fro(load.selections)
            (floor,) = medians(
                lambda load=load, selections=selections: least_work(load, next(selections)),
                repeats=sizes.least_repeats,
            )
            yield figure("resolve 128 x 4 x 2048, the floor of it", floor, "ms")
    fetched, asked = int(last.fetched.sum()), int(last.selected.sum())
    union = last.plans[0].union.numel()
    yield figure("rows of the union in it, against rows selected", union, "rows", asked)
    yield figure("rows fetched in it, against rows selected", fetched, "rows", asked)


@benchmark("gather")
def gather_rows(sizes: Sizes) -> Iterator[Figure]:
    requests, count = sizes.few_requests, sizes.gathered_rows
    num_rows = 2 * requests * sizes.context
    pool = HostPool(1, num_rows // UNIT_ROWS, UNIT_ROWS, ROW_SIZE, torch.bfloat16)
    rows = pool.layer(0).view(1, -1, ROW_SIZE)
    out = torch.empty(count, ROW_SIZE, dtype=torch.bfloat16)
    last = rows.shape[1] - count
    source = cycle(rows[0, start : start + count] for start in range(0, last, last // 16))
    drawn = islice(steps(0, requests, 1, sizes.context, sizes.top_k), 8)
    owner = torch.arange(requests)[:, None] * 2 * sizes.context
    index = cycle([(torch.from_numpy(step) + owner).int().flatten() for step in drawn])
    copied, gathered = medians(
        lambda: out.copy_(next(source)),
        lambda: gather(rows, next(index), out),
        repeats=4 * sizes.least_repeats,
    )
    size = out.nbytes / 1e6
    yield figure(
        "gather 8192 rows of 1152 B against memcpy", size / gathered, "GB/s", size / copied
    )


@benchmark("retrieve")
def resolve_and_retrieve(sizes: Sizes) -> Iterator[Figure]:
    load = make_load(sizes, sizes.few_requests, 8)
    table_sizes = load.tables.sizes
    # As many layers as share a selection in GLM-5.2 and later: 78 in 21 groups.
    pool = HostPool(4, table_sizes.num_pages, PAGE_ROWS, ROW_SIZE, torch.bfloat16)
    slabs = torch.ones(4, table_sizes.num_blocks, UNIT_ROWS + 2, ROW_SIZE, dtype=torch.bfloat16)
    staging = torch.ones(1 << 15, ROW_SIZE, dtype=torch.bfloat16)
    column = load.tables.unit_blocks[:, 0]

    def retrieve(resolution: Resolution, layers: Iterable[int]) -> None:
        for layer in layers:
            for plan in resolution.plans:
                slab = slabs[layer, :, :UNIT_ROWS]
                OPS.retrieve(plan, slab, column, pool.host_layer(layer), staging)

    for selected in load.selections:
        retrieve(resolve_next(load, selected), range(4))
    # Each with memory of its own, so that the copies alone are as cold as after resolve.
    planned = [
        resolve_next(load._replace(scratch=Scratch()), selected)
        for selected in load.selections[::-1]
    ][::-1]
    layer = cycle(range(4))
    for title, layers in (
        ("one layer", lambda: [next(layer)]),
        ("a group of 4 layers", lambda: range(4)),
    ):
        selections, plans = to_and_fro(load.selections), to_and_fro(planned)
        whole, alone = medians(
            lambda layers=layers, selections=selections: retrieve(
                resolve_next(load, next(selections)), layers()
            ),
            lambda layers=layers, plans=plans: retrieve(next(plans), layers()),
            repeats=5 * sizes.least_repeats,
        )
        name = f"resolve + retrieve, 4 x 4 x 2048, {title}, against retrieve"
        yield figure(name, whole, "ms", alone)


@benchmark("attend")
def attend(sizes: Sizes) -> Iterator[Figure]:
    rows = torch.randn(1, 30_000, ROW_SIZE).bfloat16()
    remap = torch.randint(0, 30_000, (8, sizes.top_k), dtype=torch.int32)
    picked, scratch = torch.empty(sizes.top_k, ROW_SIZE, dtype=torch.bfloat16), Scratch()
    for num_heads in (16, 64):
        query = torch.randn(8, num_heads, ROW_SIZE).bfloat16()
        weights = torch.rand(num_heads, sizes.top_k).bfloat16()

        def gathers() -> None:
            for token in range(8):
                gather(rows, remap[token], picked)

        def products(query: torch.Tensor = query, weights: torch.Tensor = weights) -> None:
            for token in range(8):
                gather(rows, remap[token], picked)
                torch.mm(query[token], picked.T)
                torch.mm(weights, picked[:, :VALUE_SIZE])

        def whole(query: torch.Tensor = query) -> None:
            OPS.attend(query, rows, remap, 0.1, VALUE_SIZE, scratch)

        alone, limit, own = medians(gathers, products, whole, repeats=2 * sizes.least_repeats)
        title = f"attend 8 x 2048 bf16, {num_heads} heads, against its two products"
        yield figure(title, own - alone, "ms", limit - alone)
