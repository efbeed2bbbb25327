"""Every kernel on the device against its reference on the host; and graphs."""

from collections.abc import Callable
from typing import Any

import torch
from planes import plane, unpadded
from schedules import Schedule, Worker
from spans import slab_and_span
from world import OPS, Batch, Sizes, make_pool, pinner

from vllm_dhisparse.core.commands import (
    PageBound,
    SpanRestored,
    StepCommands,
    UnitAdded,
    UnitLost,
    UnitState,
)
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.plan import Plan
from vllm_dhisparse.runtime.row_format import decode
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes

TABLES = ("page_of_block", "block_of_page", "unit_blocks", "unit_of_block", "unit_state")
TABLES += ("slot_of_row", "row_of_slot", "age", "hand")
FORMATS = {
    "bfloat16": (576, torch.bfloat16),
    "fp8_ds_mla": (656, torch.uint8),
    "fp8": (576, torch.uint8),
    "odd": (1029, torch.uint8),
}


def check_schedules(sizes: Sizes, device: str) -> None:
    """Random steps: every integer, and every row read, in one plan and in passes."""
    for settings, staging in (({}, 4096), ({"page_rows": 128, "row_size": 656}, 40)):
        left, right = Schedule(7, **settings), Schedule(7, **settings)
        first = Worker("reference", left, staging)
        second = Worker("triton", right, staging, device, pinner(device))
        for _ in range(sizes.steps):
            step = left.next()
            expected, _ = first.run(step)
            got, rows = second.run(right.next())
            assert torch.equal(rows, step.expected), "a row read is not the row written"
            for group, resolution in expected.items():
                assert torch.equal(resolution.selected, got[group].selected)
                assert torch.equal(resolution.fetched, got[group].fetched)
                for one, other in zip(resolution.plans, got[group].plans, strict=True):
                    assert all(map(same, one, other)), "plans differ"
            compare_tables(first.tables, second.tables)


def compare_tables(expected: Tables, got: Tables) -> None:
    for name in TABLES:
        assert torch.equal(getattr(expected, name), getattr(got, name).cpu()), name


def same(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor):
        return left == right
    return torch.equal(left.cpu(), right.cpu())


def check_restoring(sizes: Sizes, device: str) -> None:
    """Spans of history back into units."""
    shape = TableSizes(20, 4, 6, 128, 2, 2)
    commands = (
        PageBound(5, 3),
        *(UnitAdded(unit, UnitState.OPTIONAL, (9 + unit, 14 + unit)) for unit in range(3)),
        SpanRestored(0, 5, 0),
        SpanRestored(1, 5, 0),
        SpanRestored(2, 5, 64),
        UnitLost(0),
    )
    worlds = [(implementation("reference"), Tables(shape)), (OPS, Tables(shape, device))]
    pages = torch.arange(6 * 128 * 8, dtype=torch.int32).view(6, 128, 8)
    home = pages if device == "cpu" else pages.pin_memory()
    slabs = []
    for ops, tables in worlds:
        spans = ops.apply(StepCommands(0, commands), tables)
        where = tables.errors.device
        host = HostLayer.of(home)._replace(
            chunk_addresses=torch.tensor([home.data_ptr()], device=where)
        )
        slabs.append(torch.zeros(20, 66, 8, dtype=torch.int32, device=where))
        ops.restore(spans, 1, slabs[-1], tables.unit_blocks[:, 1], host)
    assert same(*slabs), "restored rows differ"
    compare_tables(worlds[0][1], worlds[1][1])
    OPS.raise_errors(worlds[1][1])


def check_copies(sizes: Sizes, device: str) -> None:
    """Row formats: retrieve, in place, publish; first and last byte of every chunk."""
    reference = plane("reference")
    for name, (row_size, dtype) in FORMATS.items():
        pool = make_pool(4 * sizes.requests[0], row_size, dtype, sizes, device)
        layer, num_rows = pool.host_layer(0), pool.num_pages * pool.layer(0).shape[1]
        edges = list(range(0, num_rows, layer.chunk_rows))
        edges += [min(row + layer.chunk_rows, num_rows) - 1 for row in edges]
        rows = torch.tensor(sorted({*edges, *range(0, num_rows, 37)}), dtype=torch.int32)
        slot = torch.full_like(rows, -1)
        slot[::3] = torch.arange(len(slot[::3]), dtype=torch.int32)
        fetch = (torch.arange(len(rows)) % 2 == 0) | (slot < 0)
        plan = Plan(0, 1, rows, slot, fetch, rows[None])
        blocks = len(slot) // UNIT_ROWS + 2
        slab = torch.randint(0, 100, (blocks, 66, row_size), dtype=torch.uint8).to(dtype)
        original = slab.clone()[:, :UNIT_ROWS]
        column = torch.arange(blocks, dtype=torch.int32).flip(0)
        on_device = Plan(0, 1, *(part.to(device) for part in plan[2:]))
        slabs = [slab[:, :UNIT_ROWS], slab.to(device).clone()[:, :UNIT_ROWS]]
        staging = torch.empty(len(rows), row_size, dtype=dtype)
        staged = staging.to(device)
        expected = reference.retrieve(plan, slabs[0], column, layer, staging)
        got = OPS.retrieve(on_device, slabs[1], column.to(device), layer, staged)
        assert same(expected, got), f"{name}: retrieved rows differ"
        assert same(*slabs), f"{name}: slots differ"
        check_in_place(on_device, original, expected[0], column.to(device), layer, name)
        if name == "fp8_ds_mla":
            decoded = torch.empty(len(rows), 576, dtype=torch.bfloat16, device=device)
            got = OPS.retrieve(on_device, slabs[1], column.to(device), layer, decoded)
            torch.testing.assert_close(
                got[0].cpu(), decode(expected[0]), rtol=0, atol=0, equal_nan=True
            )
        target = torch.arange(len(rows)).flip(0)
        target[::5] = -1
        OPS.publish(staged, target.to(device), layer)
        synchronize(device)
        home = pool.layer(0).flatten(0, 1)[target[target >= 0]]
        assert same(home, staging[target >= 0]), f"{name}: published rows differ"
        pool.close()


def check_in_place(
    plan: Plan,
    original: torch.Tensor,
    expected: torch.Tensor,
    column: torch.Tensor,
    layer: HostLayer,
    name: str,
) -> None:
    """One index reaches slab and staging; hits stay where they are."""
    block_bytes = 42_240 if name == "fp8_ds_mla" else 66 * original[0, 0].nbytes
    shape = len(original), original.shape[2], original.dtype, block_bytes, len(expected)
    slab, span = slab_and_span(*shape, column.device)
    slab.copy_(original)
    index = OPS.retrieve_in_place(plan, span, slab, column, layer, Scratch(column.device))
    assert index.shape == plan.remap.shape
    everyone = plan._replace(remap=torch.arange(len(expected), device=column.device).int()[None])
    index = OPS.retrieve_in_place(everyone, span, slab, column, layer, Scratch(column.device))[0]
    page_rows = span.rows.shape[1]
    rows = span.rows[index.long() // page_rows, index.long() % page_rows]
    assert same(rows, expected), f"{name}: rows in place differ"
    hits = (plan.slot >= 0) & ~plan.fetch
    stays = span.slab_first + span.block_rows * column[plan.slot.long() // UNIT_ROWS]
    assert same(index[hits], (stays + plan.slot % UNIT_ROWS)[hits].int()), f"{name}: a hit moved"


def check_attention(sizes: Sizes, device: str) -> None:
    """Against float64, from staging and in place, alone and in a batch."""
    for heads in sizes.heads:
        random = torch.Generator().manual_seed(heads)
        rows = torch.randn(8, 66, 576, generator=random).bfloat16()
        query = torch.randn(sizes.tokens, heads, 576, generator=random).bfloat16()
        remap = torch.randint(-1, 500, (sizes.tokens, sizes.top_k), generator=random).int()
        remap[1] = -1
        flat = rows.view(-1, 576)
        picked = flat[remap.clamp(min=0).long()].double()
        scores = torch.einsum("thd,tkd->thk", query.double(), picked) * 0.04
        scores = scores.masked_fill(remap[:, None] < 0, float("-inf"))
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        expected = torch.einsum("thk,tkd->thd", weights, picked[..., :512])
        query, rows, remap = (part.to(device) for part in (query, rows, remap))
        got = OPS.attend(query, rows.view(1, -1, 576), remap, 0.04, 512)
        torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-2, atol=2e-2)
        alone = OPS.attend(query[2:3], rows.view(1, -1, 576), remap[2:3], 0.04, 512)
        assert same(got[2:3], alone), "a query differs with its batch"
        padded = torch.randn(8, 67, 576, device=device).bfloat16()[:, :66]
        padded.copy_(rows)
        in_place = OPS.attend(query, padded, remap, 0.04, 512)
        assert same(got, in_place), "rows of a slab give other bits"


def check_graph(sizes: Sizes, device: str) -> None:
    """Capture a whole step once, and replay it on other rows and selections.

    Rows are written and published, a leader resolves, rows are copied to staging and read in
    place, and both are attended to.
    """
    batch = Batch(sizes.requests[0], sizes, device)
    pool = make_pool(batch.table_sizes.num_pages, 576, torch.bfloat16, sizes, device)
    layer, home = pool.host_layer(0), pool.layer(0).flatten(0, 1)
    reference = plane("reference")
    expected_tables, tables = batch.tables(reference, "cpu"), batch.tables(OPS, device)
    num_blocks, staging_rows = batch.table_sizes.num_blocks, len(batch.owner) * sizes.top_k
    shape = num_blocks, 576, torch.bfloat16, 66 * 1152
    slab, span = slab_and_span(*shape, staging_rows, device)
    staging = torch.zeros(staging_rows, 576, dtype=torch.bfloat16, device=device)
    query = torch.randn(len(batch.owner), sizes.heads[0], 576).bfloat16().to(device)
    selected, queries, scratch = batch.select().to(device), batch.queries(device), batch.scratch()
    address, latent = (slots.to(device) for slots in batch.written())
    new_rows = torch.zeros(len(address), 576, dtype=torch.bfloat16, device=device)
    started = torch.zeros(1, dtype=torch.int64, device=device)
    times = torch.zeros(2, 2, dtype=torch.int64, device=device)
    generates = torch.ones(1, dtype=torch.bool, device=device)
    held: dict[str, Any] = {}

    def step() -> None:
        OPS.start_clock(started)
        slab[latent // UNIT_ROWS, latent % UNIT_ROWS] = new_rows  # as the model does
        host_rows = OPS.host_rows(address, tables)
        OPS.publish(new_rows, host_rows, layer)
        OPS.enter(latent, 0, host_rows, tables, 0)
        held["found"] = OPS.resolve(selected, queries, tables, 0, staging_rows, scratch)
        (plan,) = held["found"].plans
        column = tables.unit_blocks[:, 0]
        held["rows"] = OPS.retrieve(plan, slab, column, layer, staging)
        held["out"] = OPS.attend(query, held["rows"], plan.remap, 0.04, 512, scratch)
        index = OPS.retrieve_in_place(plan, span, slab, column, layer, scratch)
        held["in place"] = OPS.attend(query, span.rows, index, 0.04, 512, scratch)
        OPS.stop_clock(started, generates, times)

    replay = captured(step, device)
    asked = batch.queries("cpu")
    cpu_scratch = Batch(1, sizes, "cpu").scratch()
    fresh = batch.tables(OPS, device)  # what the warm-up left
    for name in TABLES:
        getattr(tables, name).copy_(getattr(fresh, name))
    for number in range(sizes.steps):
        chosen = batch.select()
        selected.copy_(chosen)
        new_rows.fill_(number + 1)
        replay()
        written = reference.host_rows(batch.written()[0], expected_tables)
        reference.enter(batch.written()[1], 0, written, expected_tables, 0)
        expected = reference.resolve(chosen, asked, expected_tables, 0, staging_rows, cpu_scratch)
        plan = unpadded(held["found"].plans[0])
        assert all(map(same, expected.plans[0], plan)), "a replayed plan differs"
        assert same(expected.fetched, held["found"].fetched)
        synchronize(device)
        assert (home[written] == number + 1).all(), "a written row is not at home"
        at_home = home[expected.plans[0].union.long()]
        rows = held["rows"][0, : len(at_home)]
        assert same(at_home.view(torch.int16), rows.view(torch.int16)), "a replayed row differs"
        again = OPS.attend(query, rows[None], plan.remap.contiguous(), 0.04, 512)
        assert same(again, held["out"]), "replayed attention differs"
        assert same(again, held["in place"]), "attention in place differs"
    compare_tables(expected_tables, tables)
    OPS.raise_errors(tables)
    check_times(times.tolist(), sizes, device)
    pool.close()


def check_times(times: list[list[int]], sizes: Sizes, device: str) -> None:
    """The clock of the device is read in every replay, and its nanoseconds are some."""
    (nanoseconds, count), prefill = times
    assert prefill == [0, 0]
    assert count >= sizes.steps
    microseconds = nanoseconds / count / 1e3
    assert device == "cpu" or 10 < microseconds < 1e6, f"a step takes {microseconds} us"


def captured(step: Callable[[], object], device: str) -> Callable[[], object]:
    """Return the step as a graph to replay; without a device the step itself."""
    if device == "cpu":
        return step
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
