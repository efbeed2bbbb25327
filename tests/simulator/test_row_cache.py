"""The row cache against the data plane's reference, which is what the package serves with."""

import numpy as np
import pytest
import torch
from clock_state import Clock

from vllm_dhisparse.core.commands import (
    PageBound,
    PageDropped,
    SpanRestored,
    StepCommands,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.plan import Phase, Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes
from vllm_dhisparse.simulator.row_cache import RowCache

PAGES, UNITS, REQUESTS, TOP_K = 24, 8, 3, 40
BLOCKS = PAGES + UNITS


class Pair:
    """Both caches, told the same."""

    def __init__(self):
        self.ops, self.scratch = implementation("reference"), Scratch()
        self.tables = Tables(TableSizes(BLOCKS, UNITS, PAGES, UNIT_ROWS, 1, 1))
        self.cache = RowCache(PAGES * UNIT_ROWS, UNITS)
        self.steps = 0

    def apply(self, *commands):
        self.ops.apply(StepCommands(self.steps, commands), self.tables)
        self.steps += 1
        for command in commands:
            match command:
                case UnitAdded(unit, state, _) | UnitMoved(unit, state):
                    self.cache.set_state(unit, state)
                case UnitLost(unit):
                    self.cache.clear_unit(unit)
                case PageBound(page, _) | PageDropped(page, _):
                    self.cache.clear_rows(page * UNIT_ROWS, UNIT_ROWS)
                case SpanRestored(unit, page, first):
                    self.cache.enter_span(unit, page * UNIT_ROWS + first)

    def publish(self, rows, unit, offsets):
        slots = np.array([PAGES + unit]) * UNIT_ROWS + offsets  # blocks and units go in step
        rows = np.asarray(rows)
        self.ops.enter(torch.from_numpy(slots), 0, torch.from_numpy(rows).long(), self.tables, 0)
        unit_slots = unit * UNIT_ROWS + offsets
        self.cache.publish(rows.astype(np.int32), unit_slots.astype(np.int32))

    def resolve(self, rows):
        """``rows``: [tokens, TOP_K] host rows; the pages of request r are r, r + 3, ..."""
        table = torch.arange(PAGES, dtype=torch.int32)[None]
        queries = Queries(
            torch.zeros(len(rows), dtype=torch.int32),
            torch.full((len(rows),), PAGES * UNIT_ROWS, dtype=torch.int32),
            table,
            torch.zeros(1, dtype=torch.bool),
        )
        expected = self.ops.resolve(
            torch.from_numpy(rows), queries, self.tables, 0, 4096, self.scratch
        )
        found = self.cache.resolve(rows)
        assert found.selected.tolist() == expected.selected[Phase.GENERATION].tolist()
        fetch = [plan.union[plan.fetch] for plan in expected.plans]
        assert found.fetched.tolist() == torch.cat(fetch).tolist()
        return found

    def check(self):
        group = self.tables.group(0)
        assert self.cache.slot_of_row.tolist() == group.slot_of_row.tolist()
        assert self.cache.row_of_slot.tolist() == group.row_of_slot.tolist()
        live = self.cache.row_of_slot >= 0
        assert self.cache.age[live].tolist() == group.age.numpy()[live].tolist()
        assert self.cache.hand == int(group.hand)
        self.cache.check_integrity()
        self.tables.check_integrity()


def started():
    pair = Pair()
    pair.apply(*(PageBound(page, page) for page in range(PAGES)))
    return pair


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_data_plane_bit_for_bit(seed):
    random = np.random.default_rng(seed)
    pair = started()
    states = {}
    fetched = 0
    for _ in range(60):
        commands = []
        for unit in range(UNITS):
            if unit in states and random.random() < 0.08:
                commands.append(UnitLost(unit))
                del states[unit]
            elif unit in states and random.random() < 0.1:
                states[unit] = UnitState(random.integers(2, 4))
                commands.append(UnitMoved(unit, states[unit]))
            elif unit not in states and random.random() < 0.4:
                states[unit] = UnitState(random.integers(1, 4))
                commands.append(UnitAdded(unit, states[unit], (PAGES + unit,)))
                if states[unit] is UnitState.OPTIONAL and random.random() < 0.5:
                    commands.append(SpanRestored(unit, int(random.integers(PAGES)), 0))
        if random.random() < 0.3:
            page = int(random.integers(PAGES))
            commands += [PageDropped(page, page), PageBound(page, page)]
        pair.apply(*commands)
        tails = [unit for unit, state in states.items() if state is UnitState.TAIL]
        if tails:
            rows = random.choice(PAGES * UNIT_ROWS, 4, replace=False)
            pair.publish(rows, tails[0], random.choice(UNIT_ROWS, 4, replace=False))
        center = random.integers(PAGES * UNIT_ROWS, size=(2, 1))
        rows = (center + random.integers(0, 300, (2, TOP_K))) % (PAGES * UNIT_ROWS)
        rows[random.random(rows.shape) < 0.1] = -1
        fetched += pair.resolve(rows.astype(np.int32)).fetched.size
        pair.check()
    assert fetched > 300


def test_it_takes_the_slots_that_the_clock_takes():
    random = np.random.default_rng(1)
    cache, clock = RowCache(400, 2), Clock(2 * UNIT_ROWS)
    for unit in range(2):
        cache.set_state(unit, UnitState.REQUIRED)
    for _ in range(50):
        rows = np.unique(random.zipf(1.3, 60) % 400).astype(np.int32)
        before = cache.row_of_slot.copy()
        missing = rows[~np.isin(rows, before)]
        in_use = np.isin(before, rows)
        taken = clock.take(before < 0, (before >= 0) & ~in_use, missing.size)
        clock.hit(np.flatnonzero(in_use))
        found = cache.resolve(rows)
        assert found.fetched.tolist() == missing.tolist()
        assert cache.row_of_slot[taken].tolist() == missing[: taken.size].tolist()
        assert cache.age.tolist() == clock.age.tolist()
        assert cache.hand == clock.hand


def test_history_that_stays_is_not_replaced():
    cache = RowCache(256, 2, replaces_optional=False)
    cache.set_state(0, UnitState.OPTIONAL)
    cache.enter_span(0, 128)
    cache.set_state(1, UnitState.REQUIRED)
    for first in (0, 60, 192):
        found = cache.resolve(np.arange(first, first + 64, dtype=np.int32))
    assert found.selected[UnitState.DEAD] == 64
    assert cache.row_of_slot[:UNIT_ROWS].tolist() == list(range(128, 192))
    assert cache.resolve(np.arange(128, 192, dtype=np.int32)).fetched.size == 0
