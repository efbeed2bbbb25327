"""Random schedules: every row that a query reads is the row that was written.

Rejected rows (F19, F20), shared prefixes, reused pages and units (F29), rows of the same
step (F21), padding (F10) and stale selections (F02) are in all of them.
"""

import pytest
import torch
from planes import IMPLEMENTATIONS, plane

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitState
from vllm_dhisparse.runtime.plan import Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import Tables, TableSizes

TABLES = ("page_of_block", "block_of_page", "unit_blocks", "unit_of_block", "unit_state")
TABLES += ("slot_of_row", "row_of_slot", "age", "hand")
SETTINGS = {
    "plain": {},
    "wide pages": {"page_rows": 128, "row_size": 5},
    "small cache": {"units": 1, "top_k": 40},
    "no cache": {"units": 0},
    "much sharing": {"share": 1.0},
}


def steps_for(name, steps, staging_rows=4096):
    """Fewer where the interpreter takes seconds for a step, and more for one in passes."""
    return steps // (10 if staging_rows == 4096 else 20) if name == "triton" else steps


def run(schedule, worker, steps):
    for _ in range(steps):
        step = schedule.next()
        resolutions, rows = worker.run(step)
        worker.tables.check_integrity()
        assert torch.equal(rows, step.expected)
        assert (worker.padding == worker.padding[0, 0, 0, 0]).all()
        for group, resolution in resolutions.items():
            check(resolution, step, group, worker)


def check(resolution, step, group, worker):
    plans, valid = resolution.plans, step.valid[group]
    assert [plan.first for plan in plans] == [0] + [plan.last for plan in plans[:-1]]
    assert plans[-1].last == len(valid)
    assert torch.equal(torch.cat([plan.remap for plan in plans]) >= 0, valid)
    assert resolution.selected.sum() == valid.sum()
    assert resolution.fetched.sum() == sum(int(plan.fetch.sum()) for plan in plans)
    for plan in plans:
        assert plan.union.numel() <= worker.staging.shape[0]
        assert (plan.union.diff() > 0).all()
        placed = plan.slot[plan.slot >= 0]
        assert placed.unique().numel() == placed.numel()
        assert (plan.slot[~plan.fetch] >= 0).all()
        own = worker.tables.slot_of_row[group][plan.union.long()]
        assert torch.equal(own, plan.slot)  # law 2: no row of the union was a victim


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_row_read_is_the_row_written(name, setting, schedule, worker):
    plan = schedule(3, **SETTINGS[setting])
    run(plan, worker(name, plan), steps_for(name, 60))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_law_9_a_small_staging_changes_no_row(name, schedule, worker):
    plan = schedule(5, top_k=12)
    run(plan, worker(name, plan, staging_rows=14), steps_for(name, 40, 14))


@pytest.mark.parametrize("staging_rows", [4096, 40])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
def test_implementations_agree_on_every_integer_and_byte(
    name, setting, staging_rows, schedule, worker
):
    left, right = (schedule(11, **SETTINGS[setting]) for _ in range(2))
    staging_rows = max(staging_rows, left.top_k)
    first, second = worker("reference", left, staging_rows), worker(name, right, staging_rows)
    for _ in range(steps_for(name, 40, staging_rows)):
        expected, _ = first.run(left.next())
        got, _ = second.run(right.next())
        for group in expected:
            assert_equal(expected[group], got[group])
        for table in TABLES:
            assert torch.equal(getattr(first.tables, table), getattr(second.tables, table)), table
        assert torch.equal(first.slabs, second.slabs)
        for layer in range(4):
            assert torch.equal(first.pool.layer(layer), second.pool.layer(layer))


def assert_equal(expected, got):
    assert torch.equal(expected.selected, got.selected)
    assert torch.equal(expected.fetched, got.fetched)
    assert len(expected.plans) == len(got.plans)
    for left, right in zip(expected.plans, got.plans, strict=True):
        for name in ("union", "slot", "fetch", "remap"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert (left.first, left.last) == (right.first, right.last)


@pytest.mark.parametrize("staging_rows", [1 << 20, 3000])
@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
def test_f07_implementations_agree_at_the_size_of_a_real_step(name, staging_rows):
    """Six requests of 5,000 tokens in shuffled pages of 128 rows, one of them in prefill."""
    generator = torch.Generator().manual_seed(4)
    sizes = TableSizes(
        num_blocks=400, num_units=60, num_pages=240, page_rows=128, latent_groups=1, index_groups=1
    )
    pages = torch.randperm(240, generator=generator).tolist()
    bound = tuple(PageBound(page, block) for block, page in enumerate(pages))
    states = (UnitState.REQUIRED, UnitState.OPTIONAL)
    added = tuple(UnitAdded(unit, states[unit % 2], (240 + unit,)) for unit in range(60))
    worlds = [(plane(name), Tables(sizes), Scratch()) for name in ("reference", name)]
    for ops, tables, _ in worlds:
        ops.apply(StepCommands(0, bound + added), tables)
    owner = torch.tensor([0, 1, 2, 3, 4, *[5] * 12], dtype=torch.int32).repeat_interleave(3)
    queries = Queries(
        owner,
        torch.randint(4900, 5001, owner.shape, generator=generator).int(),
        torch.arange(240, dtype=torch.int32).view(6, 40),
        torch.arange(6) == 5,
    )
    for _ in range(4 if name != "triton" else 2 if staging_rows > 3000 else 1):
        selected = (torch.rand(len(owner), 700, generator=generator) ** 2 * 5050).int()
        expected, got = (
            ops.resolve(selected, queries, tables, 0, staging_rows, scratch)
            for ops, tables, scratch in worlds
        )
        assert_equal(expected, got)
        tables, others = worlds[0][1], worlds[1][1]
        tables.check_integrity()
        assert torch.equal(tables.row_of_slot, others.row_of_slot)
        assert torch.equal(tables.age, others.age)
        assert torch.equal(tables.hand, others.hand)


def values(rows):
    """Rows as a model sees them: memory that was never written is NaN."""
    return rows.float().masked_fill_(rows == 255, float("nan"))


@pytest.mark.parametrize("staging_rows", [4096, 30])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_law_1_attention_has_the_bits_of_a_resident_cache(
    name, staging_rows, schedule, worker, layers
):
    plan = schedule(8, row_size=24, units=3)
    hierarchy, generator = worker(name, plan, staging_rows), torch.Generator().manual_seed(1)
    for _ in range(steps_for(name, 50, staging_rows)):
        step = plan.next()
        num_tokens, top_k = step.selected[0].shape
        query = torch.randn(len(layers), num_tokens, 2, 24, generator=generator)
        place = torch.arange(num_tokens * top_k, dtype=torch.int32).view(num_tokens, top_k)

        def observe(number, plan, rows, step=step, query=query, place=place):
            attend, part = hierarchy.ops.attend, slice(plan.first, plan.last)
            out = attend(query[number, part], values(rows), plan.remap, 0.02, 16)
            valid = step.valid[layers[number].index_group]
            resident = place.masked_fill(~valid, -1)[part]
            expected = attend(
                query[number, part], values(step.expected[number]), resident, 0.02, 16
            )
            assert torch.equal(out, expected)
            assert not out.isnan().any()

        hierarchy.run(step, observe)
