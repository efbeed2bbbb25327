"""Fidelity ``rows``: every row of one or a few index groups, exactly."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.commands import (
    UNIT_ROWS,
    Command,
    PageBound,
    PageDropped,
    SpanRestored,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)
from vllm_dhisparse.core.units import max_units
from vllm_dhisparse.simulator.fidelity import Asking, Found, Pages
from vllm_dhisparse.simulator.loads import Arrival
from vllm_dhisparse.simulator.memory import Sizes
from vllm_dhisparse.simulator.row_cache import RowCache
from vllm_dhisparse.simulator.streams import Place, Templates


class Rows:
    """One row cache for each index group; the others of the model are taken to be like them.

    Args:
        templates: what requests select.
        sizes: of pool and pages.
        seed: of the selections of rejected drafts.
        replaces_optional: see `RowCache`.
        checks: whether every step is compared with what plain set arithmetic says.

    """

    def __init__(
        self,
        templates: Templates,
        sizes: Sizes,
        seed: int,
        replaces_optional: bool = True,
        checks: bool = False,
    ) -> None:
        units = max_units(sizes.num_blocks, sizes.latent_groups)
        rows = sizes.num_pages * sizes.page_tokens
        self.caches = [RowCache(rows, units, replaces_optional) for _ in range(templates.groups)]
        self._templates = templates
        self._page_tokens = sizes.page_tokens
        self._seed = seed
        self._checks = checks
        self._unit_state = np.full(units, UnitState.DEAD, dtype=np.uint8)
        self._unit_of_block = np.full(sizes.num_blocks, -1, dtype=np.int64)

    def place(self, arrival: Arrival, drafts: int) -> Place:
        """Return a stream of the request's context."""
        return self._templates.place(
            self._seed, arrival.number, arrival.context, arrival.output_tokens, drafts
        )

    def apply(self, commands: Sequence[Command]) -> int:
        """Keep units and pages as the ledger says; return rows restored."""
        restored = 0
        for command in commands:
            match command:
                case UnitAdded(unit, state, blocks):
                    self._unit_of_block[blocks[0]] = unit
                    self._set_state(unit, state)
                case UnitMoved(unit, state):
                    self._set_state(unit, state)
                case UnitLost(unit):
                    self._unit_state[unit] = UnitState.DEAD
                    for cache in self.caches:
                        cache.clear_unit(unit)
                case PageBound(page, _) | PageDropped(page, _):
                    first = page * self._page_tokens
                    for cache in self.caches:
                        cache.clear_rows(first, self._page_tokens)
                case SpanRestored(unit, page, offset):
                    first = page * self._page_tokens + offset
                    if self._unit_state[unit] != UnitState.DEAD:
                        restored += sum(cache.enter_span(unit, first) for cache in self.caches)
        return restored // len(self.caches)

    def write(self, page_table: Pages, first: int, end: int, tail_blocks: Sequence[int]) -> None:
        """Enter new rows at their place in the tail."""
        positions = np.arange(first, end)
        units = self._unit_of_block[tail_blocks][positions // UNIT_ROWS - first // UNIT_ROWS]
        slots = (units * UNIT_ROWS + positions % UNIT_ROWS).astype(np.int32)
        rows = self._host_rows(page_table, positions)
        for cache in self.caches:
            cache.publish(rows, slots)

    def resolve(self, requests: Sequence[Asking]) -> Found:
        """Resolve the selections of a step in each index group."""
        selected = np.zeros(len(UnitState))
        fetched = []
        for group, cache in enumerate(self.caches):
            rows = np.concatenate([self._selected(request, group) for request in requests])
            absent = set(rows[cache.slot_of_row[rows] < 0].tolist()) if self._checks else None
            found = cache.resolve(rows)
            if absent is not None:
                assert sorted(absent) == found.fetched.tolist(), "a row not fetched exactly once"
                assert found.selected.sum() == rows.size
                cache.check_integrity()
            selected += found.selected
            fetched.append(found.fetched.size)
        mean = float(np.mean(fetched))
        return Found(selected / len(self.caches), mean, max(fetched))

    def _set_state(self, unit: int, state: UnitState) -> None:
        self._unit_state[unit] = state
        for cache in self.caches:
            cache.set_state(unit, state)

    def _selected(self, request: Asking, group: int) -> NDArray[np.int32]:
        step = request.place.offset + request.generated
        picked = self._templates.selections(
            request.place.template,
            group,
            step,
            request.queries,
            request.accepted,
            hash((self._seed, request.number, step)) & 0x7FFFFFFF,
        )
        return self._host_rows(request.page_table, picked[picked >= 0])

    def _host_rows(self, page_table: Pages, positions: NDArray[Any]) -> NDArray[np.int32]:
        page = page_table[positions // self._page_tokens]
        rows = page * self._page_tokens + positions % self._page_tokens
        return np.asarray(rows, dtype=np.int32)
