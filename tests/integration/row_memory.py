"""A worker's latent rows on the real data plane, with every row that it reads checked."""

from collections import Counter
from typing import NamedTuple

import torch

from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.host_pool import HostLayer, HostPool
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.plan import Plan, Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import NO_PAGE, UNIT_ROWS, Tables, TableSizes

ROW_SIZE = 3
NAN = float("nan")


class Layer(NamedTuple):
    """``slab``: the tensor that it shares with one layer of each other latent group."""

    index_group: int
    latent_group: int
    slab: int
    is_leader: bool


class Batch(NamedTuple):
    """Tokens of a step, those of a request together.

    ``contents``: [num_tokens] int64 - of the new rows; ``history``: [num_requests, length]
    int64 - of all rows up to the newest, of which a request has ``lengths``.
    """

    address_slots: torch.Tensor
    latent_slots: list[torch.Tensor]
    indexer_blocks: list[int]
    contents: torch.Tensor
    history: torch.Tensor
    lengths: torch.Tensor
    queries: Queries


class Asked(NamedTuple):
    """What an index group reads in a step: its plans, and what should come of them.

    ``contents``: [num_tokens, top_k] int64; ``missing``: [n] int64 - host rows.
    """

    plans: tuple[Plan, ...]
    contents: torch.Tensor
    missing: torch.Tensor


def make_layers(num_groups, num_index_groups):
    """As many layers as give each latent group one and each index group a follower."""
    count = max(num_groups, 2 * num_index_groups)
    index_groups = [number * num_index_groups // count for number in range(count)]
    return [
        Layer(group, number % num_groups, number // num_groups, index_groups.index(group) == number)
        for number, group in enumerate(index_groups)
    ]


def rows_of(contents, layer):
    """Rows of a layer, finite and exact: [n, ROW_SIZE] float32 of [n] int64."""
    mixed = contents * (2 * layer + 3)
    return torch.stack([mixed >> shift & 0xFFFFF for shift in (0, 20, 40)], dim=-1).float()


def select_positions(queries, top_k, random):
    """Positions near and far, of the first rows that prefixes share, and none."""
    shape = len(queries.visible), top_k
    visible = queries.visible[:, None]
    far = (torch.rand(shape, generator=random) * visible).int()
    recent = visible - torch.randint(-1, 6, shape, generator=random)
    kinds = torch.stack([far, far, far // 4, recent.int(), torch.full_like(far, -1)])
    kind = torch.randint(0, len(kinds), shape, generator=random)
    selected = kinds.gather(0, kind[None])[0]
    selected[:, 1::4] = selected[:, ::4]  # twice
    return selected


def check_held(tables, units, pages):
    """Units and pages are what the scheduler then held."""
    for state, blocks in units.items():
        held = tables.unit_blocks[tables.unit_state == state]
        assert sorted(held.flatten().tolist()) == sorted(blocks), state
    assert tables.page_of_block.tolist() == pages


def check_plans(plans, union, before, after):
    """Laws 2 and 4: a row of the union keeps its slot, and a missing one is fetched once.

    Args:
        plans: of one index group and step.
        union: [n] int64 - the rows that they should read.
        before: ``slot_of_row`` after the step's writes.
        after: ``slot_of_row`` now.

    """
    rows, slot, fetch = (
        torch.cat([getattr(plan, name) for plan in plans]) for name in ("union", "slot", "fetch")
    )
    rows = rows.long()
    assert torch.equal(rows.unique(), union)
    assert torch.equal(slot, after[rows]), "a row of the union was a victim"
    on_device = before[rows] >= 0
    assert torch.equal(slot[on_device], before[rows[on_device]]), "a row of the union moved"
    assert not fetch[on_device].any(), "a row on the device was fetched"
    # Without a slot, each plan that reads the row fetches it.
    assert fetch[slot < 0].all()
    entered = union[(before[union] < 0) & (after[union] >= 0)]
    assert torch.equal(rows[fetch & (slot >= 0)].sort().values, entered), "fetched twice or never"


class RowMemory:
    """Tables, host pool, slabs and staging. All memory is NaN until a row is written."""

    def __init__(self, setup):
        self.ops, self.scratch = implementation(setup.implementation), Scratch()
        self.layers = make_layers(setup.num_groups, setup.num_index_groups)
        self.tables = Tables(
            TableSizes(
                setup.num_blocks,
                (setup.num_blocks - 1) // setup.num_groups,
                setup.num_pages,
                setup.page_tokens,
                setup.num_groups,
                setup.num_index_groups,
            )
        )
        self.pool = HostPool(
            len(self.layers),
            setup.num_pages,
            setup.page_tokens,
            ROW_SIZE,
            torch.float32,
            poisoned=True,
            huge_pages=False,
            num_threads=1,
        )
        num_slabs = self.layers[-1].slab + 1
        self.slabs = torch.full((num_slabs, setup.num_blocks, UNIT_ROWS, ROW_SIZE), NAN)
        self.staging = torch.full((setup.staging_rows, ROW_SIZE), NAN)
        self.random = torch.Generator().manual_seed(setup.seed)
        self.top_k = setup.top_k
        self.events = Counter()

    def apply(self, commands, units, pages):
        """Apply a step's commands; ``units`` and ``pages`` are what the scheduler then held."""
        self.ops.apply(commands, self.tables)
        check_held(self.tables, units, pages)

    def run(self, batch):
        """Write the rows of the step and read what its queries select, layer by layer."""
        # Indexer keys lie in the same memory.
        self.slabs[:, batch.indexer_blocks] = NAN
        host_rows = self.ops.host_rows(batch.address_slots, self.tables)
        for number, layer in enumerate(self.layers):
            rows, slots = rows_of(batch.contents, number), batch.latent_slots[layer.latent_group]
            self.slabs[layer.slab].view(-1, ROW_SIZE)[slots] = rows
            self.ops.publish(rows, host_rows, self.pool.host_layer(number))
            if layer.is_leader:
                self.ops.enter(slots, layer.latent_group, host_rows, self.tables, layer.index_group)
                asked = self.resolve(layer.index_group, batch, host_rows, self.places(slots))
            self.read(number, asked)
        self.check(batch)

    def places(self, slots):
        """Slots of the row cache that tokens were written to."""
        return self.tables.unit_of_block[slots // UNIT_ROWS] * UNIT_ROWS + slots % UNIT_ROWS

    def resolve(self, group, batch, host_rows, written):
        """Draw a selection and resolve it."""
        slot_of_row, queries = self.tables.slot_of_row[group], batch.queries
        before = slot_of_row.clone()
        assert torch.equal(before[host_rows].long(), written), "a written row is not in the map"
        selected = select_positions(queries, self.top_k, self.random)
        valid = (selected >= 0) & (selected < queries.visible[:, None])
        request = queries.request_of_token[:, None].long()
        position = selected.where(valid, torch.zeros_like(selected)).long()
        rows = self.host_rows_of(queries.block_table, request, position)
        union = rows[valid].unique()

        plans, counted, fetched = self.ops.resolve(
            selected, queries, self.tables, group, len(self.staging), self.scratch
        )
        assert len(plans) == 1 or len(union) > len(self.staging)
        assert torch.equal(torch.cat([plan.remap for plan in plans]) >= 0, valid)
        check_plans(plans, union, before, slot_of_row)
        assert counted.sum() == valid.sum()
        assert fetched.sum() == sum(plan.fetch.sum() for plan in plans)

        missing = union[before[union] < 0]
        entered = slot_of_row[missing] >= 0
        # Rows of prefills alone do not enter.
        asked_for = torch.isin(missing, rows[valid & ~queries.is_prefill[request]])
        has_cache = bool((self.tables.unit_state >= UnitState.REQUIRED).any())
        self.events.update(
            {
                "shared": len((rows + request * len(before))[valid].unique()) - len(union),
                "hits": len(union) - len(missing),
                "fetches": len(missing),
                "entered the cache": int(entered.sum()),
                "cache too small": has_cache * int((asked_for & ~entered).sum()),
                "no cache": int(not has_cache),
                "more passes": len(plans) - 1,
            }
        )
        return Asked(plans, batch.history[request, position], missing)

    def read(self, number, asked):
        """Retrieve the rows of a layer and compare them with what was written.

        The host pages given to ``retrieve`` hold the missing rows only, and one that got
        a slot only once.
        """
        layer, host = self.layers[number], self.pool.layer(number)
        at_home, readable = host.view(-1, ROW_SIZE), torch.full_like(host, NAN)
        left = readable.view(-1, ROW_SIZE)
        left[asked.missing] = at_home[asked.missing]
        for plan in asked.plans:
            self.staging.fill_(NAN)
            column = self.tables.unit_blocks[:, layer.latent_group]
            (rows,) = self.ops.retrieve(
                plan, self.slabs[layer.slab], column, HostLayer.of(readable), self.staging
            )
            union = plan.union.long()
            assert torch.equal(rows, at_home[union]), "a retrieved row is not its host row"
            assert self.staging[len(rows) :].isnan().all()
            valid = plan.remap >= 0
            got = rows[plan.remap[valid].long()]
            expected = asked.contents[plan.first : plan.last][valid]
            assert torch.equal(got, rows_of(expected, number)), "a query reads another row"
            left[union[plan.slot >= 0]] = NAN

    def host_rows_of(self, block_table, request, position):
        """Host row of each position, which must have a page."""
        page_rows = self.tables.sizes.page_rows
        page = self.tables.page_of_block[block_table[request, position // page_rows].long()]
        assert (page >= 0).all()
        return page.long() * page_rows + position % page_rows

    def check(self, batch):
        """Law 8: host rows are those of each request, and slots those of the host."""
        tables, length = self.tables, batch.history.shape[1]
        tables.check_integrity()
        request, position = (torch.arange(length) < batch.lengths[:, None]).nonzero().unbind(1)
        written = self.host_rows_of(batch.queries.block_table, request, position)
        contents = batch.history[request, position]
        for number, layer in enumerate(self.layers):
            at_home = self.pool.layer(number).view(-1, ROW_SIZE)
            assert torch.equal(at_home[written], rows_of(contents, number)), "host rows differ"
            slot_of_row = tables.slot_of_row[layer.index_group]
            row = (slot_of_row >= 0).nonzero().flatten()
            slot = slot_of_row[row].long()
            block = tables.unit_blocks[slot // UNIT_ROWS, layer.latent_group].long()
            on_device = self.slabs[layer.slab][block, slot % UNIT_ROWS]
            assert torch.equal(on_device, at_home[row]), "a slot holds another row than the host"

    def check_empty(self):
        """Law 8: nothing is left when everything has ended."""
        assert (self.tables.page_of_block == NO_PAGE).all()
        assert (self.tables.unit_state == UnitState.DEAD).all()
        self.tables.check_integrity()
