from importlib import import_module

import pytest
import torch
from planes import IMPLEMENTATIONS, plane, use_large_tiles

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitLost, UnitState
from vllm_dhisparse.runtime.plan import Phase, Queries, Tier
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import NO_SLOT, UNIT_ROWS, Tables, TableSizes

SIZES = TableSizes(
    num_blocks=60, num_units=6, num_pages=40, page_rows=64, latent_groups=1, index_groups=1
)
PAGES = {1: 17, 9: 4, 3: 11}  # F39: no id is equal in two id spaces
BLOCK_TABLE = torch.tensor([[9, 1], [3, 0]], dtype=torch.int32)


class Cache:
    """Two requests: 128 tokens in blocks 9 and 1, 64 tokens in block 3."""

    def __init__(self, name, units=0):
        self.ops, self.tables, self.scratch = plane(name), Tables(SIZES), Scratch()
        pages = [PageBound(page, block) for block, page in PAGES.items()]
        added = [UnitAdded(unit, UnitState.REQUIRED, (40 + unit,)) for unit in range(units)]
        self.ops.apply(StepCommands(0, (*pages, *added)), self.tables)

    def write_tail(self, positions):
        self.ops.apply(
            StepCommands(self.tables.step + 1, (UnitAdded(5, UnitState.TAIL, (50,)),)), self.tables
        )
        rows = torch.tensor([host_row(0, position) for position in positions])
        mapping = 50 * UNIT_ROWS + torch.arange(len(positions))
        self.ops.enter(mapping, 0, rows, self.tables, 0)

    def resolve(
        self,
        selected,
        visible=None,
        request=None,
        prefill=(False, False),
        staging=512,
        most_rows=None,
    ):
        selected = torch.tensor(selected, dtype=torch.int32)
        request = torch.tensor(request or [0] * len(selected), dtype=torch.int32)
        visible = torch.tensor(visible or [128] * len(selected), dtype=torch.int32)
        queries = Queries(request, visible, BLOCK_TABLE, torch.tensor(prefill), most_rows)
        got = self.ops.resolve(selected, queries, self.tables, 0, staging, self.scratch)
        self.tables.check_integrity()
        return got


def host_row(request, position):
    page = PAGES[int(BLOCK_TABLE[request, position // 64])]
    return page * 64 + position % 64


def rows_of(plan):
    """Host row of every entry of the remap, -1 where there is none."""
    rows = torch.cat([plan.union, torch.tensor([-1], dtype=torch.int32)])
    return rows[plan.remap.long()].tolist()


@pytest.fixture(params=IMPLEMENTATIONS)
def make_cache(request):
    return lambda **settings: Cache(request.param, **settings)


def test_a_step_of_few_rows_is_one_plan_without_a_look_at_the_device(make_cache, monkeypatch):
    """More selections than staging holds, but not more rows."""
    cache = make_cache()
    if hasattr(cache.ops, "raise_word"):
        resolver = import_module("vllm_dhisparse.runtime.triton.resolution")._Resolver
        monkeypatch.setattr(resolver, "_size_of", None)
    got = cache.resolve([[0, 1, 2, 3], [3, 2, 4, 5]], staging=6, most_rows=6)
    (plan,) = got.plans
    assert rows_of(plan) == [[host_row(0, p) for p in ps] for ps in ([0, 1, 2, 3], [3, 2, 4, 5])]


def test_f01_every_entry_of_the_output_is_written(make_cache):
    cache = make_cache()
    cache.scratch.take("remap", 64, dtype=torch.int32).fill_(123456)
    got = cache.resolve([[1, -1, 0, 0], [5, 6, 7, 8]], visible=[2, 128], request=[0, -1])
    rows = rows_of(got.plans[0])
    assert rows == [[host_row(0, 1), -1, host_row(0, 0), host_row(0, 0)], [-1] * 4]
    assert got.selected.sum() == 3


def test_f02_only_visible_positions_select(make_cache):
    cache = make_cache()
    odd = [-1, -(2**31), 5, 63, 64, 2**31 - 1, 4, 4]
    got = cache.resolve([odd, odd], visible=[5, 64], request=[0, 1])
    first, second = rows_of(got.plans[0])
    assert first == [-1] * 6 + [host_row(0, 4)] * 2
    assert second == [-1, -1, host_row(1, 5), host_row(1, 63), -1, -1] + [host_row(1, 4)] * 2
    assert got.fetched[Phase.GENERATION] == 4


def test_f03_a_row_selected_twice_is_fetched_once_and_has_one_slot(make_cache):
    cache = make_cache(units=1)
    first = cache.resolve([[6, 6, 1], [1, 6, 6]])
    assert first.fetched[Phase.GENERATION] == 2
    assert first.selected[Phase.GENERATION].tolist() == [6, 0, 0, 0]
    again = cache.resolve([[6, 6, 1], [1, 6, 6]])
    assert again.fetched.sum() == 0
    assert again.selected[Phase.GENERATION, Tier.REQUIRED] == 6
    assert torch.equal(again.plans[0].remap, torch.tensor([[1, 1, 0], [0, 1, 1]]).int())


@pytest.mark.parametrize("top_k", [1, 31, 32, 33, 63, 64, 65, 128])
def test_f04_f08_all_sizes_resolve_and_a_replay_changes_nothing(make_cache, top_k):
    cache = make_cache(units=2)
    selected = [torch.randperm(128)[:top_k].tolist()]
    assert cache.resolve(selected).fetched.sum() == top_k
    state = cache.tables.slot_of_row.clone(), cache.tables.age.clone(), cache.tables.hand.clone()
    for _ in range(2):
        replay = cache.resolve(selected)
        assert replay.fetched.sum() == 0
    assert torch.equal(state[0], cache.tables.slot_of_row)
    assert torch.equal(state[2], cache.tables.hand)
    assert set(cache.tables.age[cache.tables.row_of_slot >= 0].tolist()) == {3}


def test_f05_everything_missing_and_distinct(make_cache):
    cache = make_cache(units=2)
    got = cache.resolve(torch.randperm(128).view(4, 32).tolist())
    plan = got.plans[0]
    assert plan.fetch.all()
    assert plan.slot.unique().numel() == 128
    assert plan.remap.unique().numel() == 128


def test_f08_rows_beyond_two_gib_are_addressed_whole(make_cache, monkeypatch):
    use_large_tiles(monkeypatch)
    cache = make_cache()
    sizes = SIZES._replace(num_pages=2**19, num_units=1)
    cache.tables = Tables(sizes)
    bound = PageBound(2**19 - 1, 9)
    cache.ops.apply(StepCommands(0, (bound,)), cache.tables)
    mapping = torch.tensor([9 * 64 + 63])
    row = cache.ops.host_rows(mapping, cache.tables)
    assert row.item() == 2**25 - 1
    assert row.item() * 656 > 2**32
    got = cache.resolve([[63]], visible=[64])
    assert got.plans[0].union.tolist() == [2**25 - 1]


def test_f09_a_step_without_queries(make_cache):
    cache = make_cache(units=1)
    before = cache.tables.age.clone(), cache.tables.slot_of_row.clone()
    queries = Queries(
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, 0, dtype=torch.int32),
        torch.zeros(0, dtype=torch.bool),
    )
    none = torch.zeros(0, 16, dtype=torch.int32)
    got = cache.ops.resolve(none, queries, cache.tables, 0, 16, cache.scratch)
    assert got.plans[0].union.numel() == 0
    assert got.selected.sum() == got.fetched.sum() == 0
    assert torch.equal(before[0], cache.tables.age)
    assert torch.equal(before[1], cache.tables.slot_of_row)


def test_f10_padding_changes_no_counter_and_no_map(make_cache):
    left, right = make_cache(units=1), make_cache(units=1)
    plain = left.resolve([[1, 2, 3]])
    padded = right.resolve([[1, 2, 3], [7, 8, 9]], visible=[128, 128], request=[0, -1])
    assert torch.equal(plain.selected, padded.selected)
    assert torch.equal(plain.fetched, padded.fetched)
    assert torch.equal(left.tables.slot_of_row, right.tables.slot_of_row)
    assert (padded.plans[0].remap[1] == -1).all()


def test_f11_f21_rows_written_in_the_step_are_found_in_the_tail(make_cache):
    cache = make_cache()
    cache.write_tail([100, 101, 102])
    got = cache.resolve([[100, -1, -1], [100, 101, -1], [100, 101, 102]], visible=[101, 102, 103])
    assert got.selected[Phase.GENERATION].tolist() == [0, 6, 0, 0]
    assert not got.plans[0].fetch.any()


def test_f12_a_union_above_staging_is_served_in_passes(make_cache):
    cache = make_cache()
    got = cache.resolve([[0, 1, 2], [2, 3, 4], [2, 4, 5], [9, 9, -1]], staging=4)
    assert [(plan.first, plan.last) for plan in got.plans] == [(0, 1), (1, 3), (3, 4)]
    assert rows_of(got.plans[1])[0] == [host_row(0, position) for position in (2, 3, 4)]
    assert got.fetched[Phase.GENERATION] == 3 + 4 + 1


def test_law_4_a_row_with_a_slot_is_fetched_by_one_pass_only(make_cache):
    cache = make_cache(units=1)
    got = cache.resolve([[0, 1, 2], [2, 3, 4], [2, 4, 5]], staging=3)
    assert len(got.plans) == 3
    assert got.fetched[Phase.GENERATION] == 6
    assert got.plans[1].fetch.tolist() == [False, True, True]


def test_law_2_no_row_of_any_pass_is_a_victim(make_cache):
    cache = make_cache(units=1)
    cache.resolve([list(range(32)), list(range(32, 64))])
    got = cache.resolve([list(range(64, 96)), list(range(32))], staging=32)
    slots = cache.tables.slot_of_row[0]
    rows = [host_row(0, position) for position in range(96)]
    assert (slots[rows[:32]] >= 0).all()
    assert (slots[rows[64:96]] >= 0).all()
    assert (slots[rows[32:64]] == NO_SLOT).all()
    assert got.fetched[Phase.GENERATION] == 32


def test_law_2_the_current_union_is_protected_where_victims_are_few(make_cache):
    cache = make_cache(units=1)
    cache.resolve([list(range(64))])
    for _ in range(3):  # more misses than other rows, whatever the ages
        slots = cache.tables.slot_of_row[0]
        held = [position for position in range(128) if slots[host_row(0, position)] >= 0]
        others = [position for position in range(128) if position not in held]
        rows = [host_row(0, position) for position in held[:40]]
        before = slots[rows].clone()
        got = cache.resolve([held[:40], others[:40]])
        assert torch.equal(cache.tables.slot_of_row[0, rows], before)
        assert (got.plans[0].slot == NO_SLOT).sum() == 40 - 24


def test_f06_capacity_zero_serves_everything_from_staging(make_cache):
    cache = make_cache()
    for _ in range(2):
        got = cache.resolve([[14, 15, 12]])
        assert got.plans[0].slot.tolist() == [NO_SLOT] * 3
        assert got.fetched[Phase.GENERATION] == 3


def test_f29_slots_of_a_lost_unit_are_all_misses_for_the_next_tenant(make_cache):
    cache = make_cache(units=1)
    cache.resolve([[1, 2, 3]])
    again = (UnitLost(0), UnitAdded(0, UnitState.OPTIONAL, (40,)))
    cache.ops.apply(StepCommands(1, again), cache.tables)
    got = cache.resolve([[1, 2, 3]])
    assert got.fetched[Phase.GENERATION] == 3
    assert cache.resolve([[1, 2, 3]]).selected[Phase.GENERATION, Tier.OPTIONAL] == 3


def test_a_prefill_reads_the_cache_and_leaves_it_as_it_was(make_cache):
    cache = make_cache(units=1)
    cache.resolve([list(range(64))])
    before = [cache.tables.age.clone(), cache.tables.slot_of_row.clone(), cache.tables.hand.clone()]
    got = cache.resolve([list(range(128))], prefill=(True, False))
    assert got.selected[Phase.PREFILL].tolist() == [64, 0, 64, 0]
    assert got.fetched[Phase.PREFILL] == 64
    after = [cache.tables.age, cache.tables.slot_of_row, cache.tables.hand]
    assert all(map(torch.equal, before, after))


def test_rows_of_a_prefill_are_no_victims_of_the_decode_beside_it(make_cache):
    cache = make_cache(units=1)
    cache.resolve([list(range(64))])
    cache.resolve([list(range(32)), [*range(8), *[-1] * 24]], request=[0, 1], prefill=(True, False))
    slots = cache.tables.slot_of_row[0]
    assert all(slots[host_row(0, position)] >= 0 for position in range(32))
    assert all(slots[host_row(1, position)] >= 0 for position in range(8))


def test_f34_counters_outlive_the_next_step(make_cache):
    cache = make_cache()
    first = cache.resolve([[0, 1, 2]])
    kept = first.selected.clone(), first.fetched.clone()
    cache.resolve([[3, 4, 5, 6]])
    assert torch.equal(first.selected, kept[0])
    assert torch.equal(first.fetched, kept[1])


def test_staging_holds_at_least_one_query(make_cache):
    with pytest.raises(AssertionError, match="one query"):
        make_cache().resolve([[1, 2, 3]], staging=2)


def test_a_row_without_a_host_page_is_refused(make_cache):
    with pytest.raises(AssertionError, match="without a host page"):
        make_cache().resolve([[70]], request=[1])
