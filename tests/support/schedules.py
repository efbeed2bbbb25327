"""A small engine that decides nothing: random requests, pages, units and selections.

``Schedule`` plays the scheduler and vLLM's block table, and knows what every row should
hold. ``Worker`` does what a model does with the data plane. Both are seeded, so that all
implementations see the same steps.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from planes import plane

from vllm_dhisparse.core.commands import (
    PageBound,
    PageDropped,
    StepCommands,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.plan import Queries, Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes


class Layer(NamedTuple):
    index_group: int
    latent_group: int
    is_leader: bool


POISON = 255  # in memory that no row was written to, and in no row

# Two index groups over two latent groups, so that no id is equal by chance.
LAYERS = (Layer(0, 0, True), Layer(0, 1, False), Layer(0, 0, False), Layer(1, 1, True))


class Step(NamedTuple):
    commands: StepCommands
    slot_mapping: torch.Tensor  # address group
    latent_mappings: list[torch.Tensor]
    new_rows: torch.Tensor  # [layers, num_tokens, row_size]
    selected: list[torch.Tensor]  # one per index group
    expected: torch.Tensor  # [layers, num_tokens, top_k, row_size], 0 where nothing is selected
    valid: list[torch.Tensor]
    queries: Queries
    lost_blocks: list[int]


@dataclass(eq=False)
class Request:
    rows: torch.Tensor  # [layers, written, row_size]
    blocks: list[int]
    tails: dict[int, int] = field(default_factory=dict)  # unit index in the request -> unit
    committed: int = 0


class Schedule:
    def __init__(self, seed, *, row_size=7, page_rows=64, top_k=12, units=10, share=0.5):
        self.random = torch.Generator().manual_seed(seed)
        self.sizes = TableSizes(
            num_blocks=120,
            num_units=units + 14,
            num_pages=40,
            page_rows=page_rows,
            latent_groups=2,
            index_groups=2,
        )
        self.row_size, self.top_k, self.cache_units, self.share = row_size, top_k, units, share
        self.free_blocks = list(range(1, 120))
        self.free_units = list(range(units + 14))
        self.free_pages = list(range(40))
        self.pages, self.block_users, self.units = {}, {}, {}
        self.requests, self.commands, self.lost_blocks, self.step = [], [], [], 0

    def draw(self, low, high):
        return int(torch.randint(low, high, (), generator=self.random))

    def pop(self, items):
        return items.pop(self.draw(0, len(items)))

    def bind(self, request, length):
        while len(request.blocks) * self.sizes.page_rows < length:
            block = self.pop(self.free_blocks)
            self.pages[block] = self.pop(self.free_pages)
            self.block_users[block] = 1
            request.blocks.append(block)
            self.commands.append(PageBound(self.pages[block], block))

    def add_unit(self, state):
        unit = self.pop(self.free_units)
        self.units[unit] = tuple(self.pop(self.free_blocks) for _ in range(2))
        self.commands.append(UnitAdded(unit, state, self.units[unit]))
        return unit

    def lose_unit(self, unit):
        blocks = self.units.pop(unit)
        self.free_blocks.extend(blocks)
        self.free_units.append(unit)
        self.lost_blocks.extend(blocks)
        self.commands.append(UnitLost(unit))

    def cache(self):
        tails = {unit for request in self.requests for unit in request.tails.values()}
        return [unit for unit in self.units if unit not in tails]

    def absorb_or_lose(self, unit):
        if len(self.cache()) < self.cache_units and self.draw(0, 2):
            state = (UnitState.REQUIRED, UnitState.OPTIONAL)[self.draw(0, 2)]
            self.commands.append(UnitMoved(unit, state))
        else:
            self.lose_unit(unit)

    def admit(self):
        request = Request(torch.empty(len(LAYERS), 0, self.row_size, dtype=torch.uint8), [])
        donors = [other for other in self.requests if other.committed >= self.sizes.page_rows]
        if donors and self.draw(0, 100) < 100 * self.share:
            donor = donors[self.draw(0, len(donors))]
            shared = self.draw(1, donor.committed // self.sizes.page_rows + 1)
            request.blocks = donor.blocks[:shared]
            for block in request.blocks:
                self.block_users[block] += 1
            request.committed = shared * self.sizes.page_rows
            request.rows = donor.rows[:, : request.committed].clone()
        self.requests.append(request)

    def finish(self, request):
        for block in request.blocks:
            self.block_users[block] -= 1
            if self.block_users[block] == 0:
                self.commands.append(PageDropped(self.pages[block], block))
                self.free_pages.append(self.pages.pop(block))
                self.free_blocks.append(block)
        tails = list(request.tails.values())
        self.requests.remove(request)
        for unit in tails:
            self.absorb_or_lose(unit)

    def churn(self):
        if len(self.requests) < 3 and (not self.requests or self.draw(0, 3) == 0):
            self.admit()
        for request in list(self.requests):
            if request.committed > 350 or self.draw(0, 40) == 0:
                self.finish(request)
        if not self.requests:
            self.admit()
        for unit in self.cache():
            if self.draw(0, 12) == 0:
                self.lose_unit(unit)
        if len(self.cache()) < self.cache_units and self.draw(0, 2):
            self.add_unit((UnitState.REQUIRED, UnitState.OPTIONAL)[self.draw(0, 2)])

    def write(self, request, count):
        """New rows on top of the committed ones; rejected rows are written over."""
        first, last = request.committed, request.committed + count
        rows = torch.randint(
            0, POISON, (len(LAYERS), count, self.row_size), generator=self.random
        ).to(torch.uint8)
        request.rows = torch.cat([request.rows[:, :first], rows], dim=1)
        self.bind(request, last)
        for index in list(request.tails):
            if (index + 1) * UNIT_ROWS <= first:
                self.absorb_or_lose(request.tails.pop(index))
        for index in range(first // UNIT_ROWS, (last - 1) // UNIT_ROWS + 1):
            if index not in request.tails:
                request.tails[index] = self.add_unit(UnitState.TAIL)
        return torch.arange(first, last), rows

    def select(self, visible):
        """Mostly near positions, with what a top-k kernel may leave behind."""
        near = (visible - 1 - (torch.rand(self.top_k, generator=self.random) ** 3) * visible).int()
        far = torch.randint(0, visible, (self.top_k,), generator=self.random).int()
        odd = torch.tensor([-1, -7, visible, visible + 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
        odd = odd[torch.randint(0, 6, (self.top_k,), generator=self.random)]
        kind = torch.randint(0, 10, (self.top_k,), generator=self.random)
        return torch.where(kind < 6, near.clamp(min=0), torch.where(kind < 9, far, odd))

    def next(self):
        self.commands, self.lost_blocks = [], []
        self.churn()
        slots, latent, new_rows, positions, owner = [], [[], []], [], [], []
        is_prefill = torch.zeros(len(self.requests), dtype=torch.bool)
        for number, request in enumerate(self.requests):
            is_prefill[number] = request.committed == 0 or self.draw(0, 8) == 0
            count = self.draw(20, 90) if is_prefill[number] else self.draw(1, 6)
            position, rows = self.write(request, count)
            new_rows.append(rows)
            positions.append(position)
            owner.append(torch.full((count,), number, dtype=torch.int32))
            blocks = torch.tensor(request.blocks)
            page_rows = self.sizes.page_rows
            slots.append(blocks[position // page_rows] * page_rows + position % page_rows)
            for group in range(2):
                tail = [self.units[request.tails[int(p) // UNIT_ROWS]][group] for p in position]
                latent[group].append(torch.tensor(tail) * UNIT_ROWS + position % UNIT_ROWS)
        return self.assemble(slots, latent, new_rows, positions, owner, is_prefill)

    def assemble(self, slots, latent, new_rows, positions, owner, is_prefill):
        padding = self.draw(0, 3)  # F10: a captured batch is larger than what runs
        none = torch.full((padding,), -1)
        positions, owner = torch.cat([*positions, none]), torch.cat([*owner, none.int()])
        width = max(len(request.blocks) for request in self.requests)
        table = torch.zeros(len(self.requests), width, dtype=torch.int32)
        for number, request in enumerate(self.requests):
            table[number, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        selected = [
            torch.stack([self.select(int(p) + 1 if p >= 0 else 50) for p in positions])
            for _ in range(2)
        ]
        visible = (positions + 1).int()
        visible[positions < 0] = 50
        valid = [(s >= 0) & (s < visible[:, None]) & (owner >= 0)[:, None] for s in selected]
        expected = torch.zeros(
            len(LAYERS), len(positions), self.top_k, self.row_size, dtype=torch.uint8
        )
        for number, layer in enumerate(LAYERS):
            for token in (owner >= 0).nonzero().flatten().tolist():
                mask = valid[layer.index_group][token]
                rows = self.requests[int(owner[token])].rows[number]
                expected[number, token, mask] = rows[
                    selected[layer.index_group][token][mask].long()
                ]
        pad_rows = torch.zeros(len(LAYERS), padding, self.row_size, dtype=torch.uint8)
        step = Step(
            StepCommands(self.step, tuple(self.commands)),
            torch.cat([*slots, none]),
            [torch.cat([*group, none]) for group in latent],
            torch.cat([*new_rows, pad_rows], dim=1),
            selected,
            expected,
            valid,
            Queries(owner, visible, table, is_prefill),
            self.lost_blocks,
        )
        self.step += 1
        for request in self.requests:  # the newest rows may be rejected
            written = request.rows.shape[1]
            request.committed = max(request.committed + 1, written - self.draw(0, 4))
        return step


class Worker:
    def __init__(self, name, schedule, staging_rows=4096, device="cpu", pinner=None):
        sizes, self.device = schedule.sizes, torch.device(device)
        self.ops, self.scratch = plane(name), Scratch(device)
        self.tables = Tables(sizes, device)
        self.pool = HostPool(
            len(LAYERS),
            sizes.num_pages,
            sizes.page_rows,
            schedule.row_size,
            torch.uint8,
            poisoned=True,
            num_threads=1,
            device=device,
            pinner=pinner,
        )
        padded = torch.full(
            (len(LAYERS), sizes.num_blocks, UNIT_ROWS + 2, schedule.row_size), POISON
        ).to(self.device, torch.uint8)
        self.padding, self.slabs = padded[:, :, UNIT_ROWS:], padded[:, :, :UNIT_ROWS]
        self.staging = torch.full(
            (staging_rows, schedule.row_size), POISON, dtype=torch.uint8, device=device
        )

    def run(self, step, observe=lambda layer, plan, rows: None):
        """Returns the resolutions, and the rows of each layer by query and rank.

        ``observe`` sees what the attention of each layer would see.
        """
        step = moved(step, self.device)
        self.ops.apply(step.commands, self.tables)
        self.slabs[:, step.lost_blocks] = POISON
        rows = self.ops.host_rows(step.slot_mapping, self.tables)
        resolutions, retrieved = {}, []
        for number, layer in enumerate(LAYERS):
            slab, host = self.slabs[number], self.pool.host_layer(number)
            mapping = step.latent_mappings[layer.latent_group]
            real = mapping >= 0
            slab[mapping[real] // UNIT_ROWS, mapping[real] % UNIT_ROWS] = step.new_rows[number][
                real
            ]
            self.ops.publish(step.new_rows[number], rows, host)
            if layer.is_leader:
                self.ops.enter(mapping, layer.latent_group, rows, self.tables, layer.index_group)
                resolution = self.ops.resolve(
                    step.selected[layer.index_group],
                    step.queries,
                    self.tables,
                    layer.index_group,
                    self.staging.shape[0],
                    self.scratch,
                )
                resolutions[layer.index_group] = copy_of(resolution)
            out = torch.zeros(step.expected.shape[1:], dtype=torch.uint8, device=self.device)
            for plan in resolution.plans:
                column = self.tables.unit_blocks[:, layer.latent_group]
                staged = self.ops.retrieve(plan, slab, column, host, self.staging)
                observe(number, plan, staged)
                staged = staged[0]
                picked = staged[plan.remap.clamp(min=0).long()] if len(staged) else 0
                out[plan.first : plan.last] = picked * (plan.remap >= 0)[..., None]
            retrieved.append(out)
        return resolutions, torch.stack(retrieved).cpu()


def moved(step, device):
    """The step's inputs on a device."""
    return step._replace(
        slot_mapping=step.slot_mapping.to(device),
        latent_mappings=[mapping.to(device) for mapping in step.latent_mappings],
        new_rows=step.new_rows.to(device),
        selected=[selected.to(device) for selected in step.selected],
        queries=Queries(*(part.to(device) for part in step.queries[:4])),
    )


def copy_of(resolution):
    """The same on the host, in memory of its own."""
    names = ("union", "slot", "fetch", "remap")
    plans = tuple(
        plan._replace(**{name: getattr(plan, name).cpu().clone() for name in names})
        for plan in resolution.plans
    )
    return Resolution(plans, resolution.selected.cpu().clone(), resolution.fetched.cpu().clone())
