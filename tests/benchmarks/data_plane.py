"""Figures of the CPU data plane: resolve, gather, attend."""

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import NamedTuple, TypeVar

import torch
from harness import Figure, benchmark, figure, medians
from selections import steps

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitState
from vllm_dhisparse.runtime.cpu.attention import gather
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.ops import data_plane
from vllm_dhisparse.runtime.plan import Queries, Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes

ROW_SIZE, VALUE_SIZE, TOP_K, CONTEXT = 576, 512, 2048, 100_000
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


def make_load(
    requests: int, per_step: int, rows_per_request: int, num_steps: int, shuffled: bool = False
) -> Load:
    blocks = -(-CONTEXT // PAGE_ROWS)
    pages = requests * blocks
    units = requests * rows_per_request // UNIT_ROWS
    tables = Tables(TableSizes(pages + units, units, pages, PAGE_ROWS, 1, 1))
    order = torch.arange(pages)
    if shuffled:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    bound = tuple(PageBound(page, block) for block, page in enumerate(order.tolist()))
    added = tuple(UnitAdded(unit, UnitState.OPTIONAL, (pages + unit,)) for unit in range(units))
    OPS.apply(StepCommands(0, bound + added), tables)
    owner = torch.arange(requests, dtype=torch.int32).repeat_interleave(per_step)
    asked = Queries(
        owner,
        torch.full_like(owner, CONTEXT),
        torch.arange(pages, dtype=torch.int32).view(requests, blocks),
        torch.zeros(requests, dtype=torch.bool),
    )
    drawn = islice(steps(0, requests, per_step, CONTEXT, TOP_K), num_steps)
    selections = [torch.from_numpy(step) for step in drawn]
    keys = [(owner[:, None].long() * CONTEXT + step).flatten() for step in selections]
    return Load(tables, asked, selections, keys, Scratch())


def to_and_fro(items: list[Item]) -> Iterator[Item]:
    """Repeat a few steps without a jump from the last to the first."""
    return cycle(items + items[-2:0:-1])


def resolve_next(load: Load, selected: torch.Tensor) -> Resolution:
    return OPS.resolve(selected, load.queries, load.tables, 0, 1 << 20, load.scratch)


@benchmark("resolve")
def resolve() -> Iterable[Figure]:
    load = make_load(requests=128, per_step=4, rows_per_request=4096, num_steps=6)
    for selected in load.selections:
        last = resolve_next(load, selected)
    selections, keys = to_and_fro(load.selections), to_and_fro(load.rows_of_unique)
    own, unique = medians(
        lambda: resolve_next(load, next(selections)),
        lambda: torch.unique(next(keys)),
        repeats=9,
    )
    fetched, asked = int(last.fetched.sum()), int(last.selected.sum())
    return [
        figure("resolve 128 x 4 x 2048, against torch.unique", own, "ms", unique),
        figure("rows fetched in it, against rows selected", fetched, "rows", asked),
    ]


@benchmark("gather")
def gather_rows() -> Iterable[Figure]:
    pool = HostPool(1, 12_500, 64, ROW_SIZE, torch.bfloat16).layer(0).view(1, 800_000, ROW_SIZE)
    out = torch.empty(8192, ROW_SIZE, dtype=torch.bfloat16)
    source = cycle(pool[0, start : start + 8192] for start in range(0, 780_000, 50_000))
    drawn = [step.flatten() for step in islice(steps(0, 4, 1, CONTEXT, TOP_K), 8)]
    owner = torch.arange(4).repeat_interleave(TOP_K) * 2 * CONTEXT
    index = cycle([(torch.from_numpy(step) + owner).int() for step in drawn])
    copied, gathered = medians(
        lambda: out.copy_(next(source)), lambda: gather(pool, next(index), out), repeats=41
    )
    size = out.nbytes / 1e6
    return [
        figure("gather 8192 rows of 1152 B against memcpy", size / gathered, "GB/s", size / copied)
    ]


@benchmark("retrieve")
def resolve_and_retrieve() -> Iterable[Figure]:
    load = make_load(requests=4, per_step=4, rows_per_request=4096, num_steps=8)
    sizes = load.tables.sizes
    # As many layers as share a selection in GLM-5.2 and later: 78 in 21 groups.
    pool = HostPool(4, sizes.num_pages, PAGE_ROWS, ROW_SIZE, torch.bfloat16)
    slabs = torch.ones(4, sizes.num_blocks, UNIT_ROWS + 2, ROW_SIZE, dtype=torch.bfloat16)
    staging = torch.ones(1 << 15, ROW_SIZE, dtype=torch.bfloat16)
    column = load.tables.unit_blocks[:, 0]

    def retrieve(resolution: Resolution, layers: Iterable[int]) -> None:
        for layer in layers:
            for plan in resolution.plans:
                slab = slabs[layer, :, :UNIT_ROWS]
                OPS.retrieve(plan, slab, column, pool.layer(layer), staging)

    for selected in load.selections:
        retrieve(resolve_next(load, selected), range(4))
    # Each with memory of its own, so that the copies alone are as cold as after resolve.
    planned = [
        resolve_next(load._replace(scratch=Scratch()), selected)
        for selected in load.selections[::-1]
    ][::-1]
    layer, number = cycle(range(4)), len(load.selections)
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
            repeats=6 * (number - 1),
        )
        name = f"resolve + retrieve, 4 x 4 x 2048, {title}, against retrieve"
        yield figure(name, whole, "ms", alone)


@benchmark("attend")
def attend() -> Iterable[Figure]:
    rows = torch.randn(1, 30_000, ROW_SIZE).bfloat16()
    remap = torch.randint(0, 30_000, (8, TOP_K), dtype=torch.int32)
    picked, scratch = torch.empty(TOP_K, ROW_SIZE, dtype=torch.bfloat16), Scratch()
    for num_heads in (16, 64):
        query = torch.randn(8, num_heads, ROW_SIZE).bfloat16()
        weights = torch.rand(num_heads, TOP_K).bfloat16()

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

        alone, limit, own = medians(gathers, products, whole)
        title = f"attend 8 x 2048 bf16, {num_heads} heads, against its two products"
        yield figure(title, own - alone, "ms", limit - alone)
