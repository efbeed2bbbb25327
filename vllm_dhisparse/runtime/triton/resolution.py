"""From the selections of a step to its plans.

As long as staging holds a row for every selection, which is so in every captured batch, or
all rows of the requests in the step, the step is one plan of fixed size. Otherwise the host has
to know how large the union is, and waits for the device; no graph can be captured then.
"""

from bisect import bisect_right
from typing import Any, NamedTuple

import torch

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.kernels import lookup, remapping, replacement, shapes, union
from vllm_dhisparse.runtime.plan import Phase, Plan, Queries, Resolution, Tier
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import NO_ROW, UNIT_ROWS, Tables

_WORD_ROWS = 32


class _Bitmap(NamedTuple):
    """A union as words, and its rows before each word; ``counts``: rows of each tile."""

    words: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor


class _Found(NamedTuple):
    """Rows of a union, ascending, then ``NO_ROW``; and what is known about each."""

    rows: torch.Tensor
    slot: torch.Tensor
    tier: torch.Tensor
    fetch: torch.Tensor


def resolve(
    selected: torch.Tensor,
    queries: Queries,
    tables: Tables,
    index_group: int,
    staging_rows: int,
    scratch: Scratch,
) -> Resolution:
    assert selected.dtype == torch.int32
    assert selected.numel() < 2**31, "more selections than a kernel counts"
    assert selected.shape[1] <= staging_rows, "staging holds less than one query's rows"
    return _Resolver(selected, queries, tables, index_group, scratch).resolve(staging_rows)


class _Resolver:
    """One step of one index group; all it changes lies in the tables and in scratch."""

    def __init__(
        self,
        selected: torch.Tensor,
        queries: Queries,
        tables: Tables,
        index_group: int,
        scratch: Scratch,
    ) -> None:
        self.selected, self.queries, self.tables, self.scratch = selected, queries, tables, scratch
        self.group = tables.group(index_group)
        self.is_prefill = queries.is_prefill.view(torch.uint8)
        self.num_words = tables.sizes.host_rows // _WORD_ROWS
        self.marks = self._int32s("marks", len(Phase) * self.num_words)
        self.generation = self.marks[: self.num_words]
        self.rows = self._int32s("remap", selected.numel()).view(selected.shape)
        # Not in scratch: they outlive the plans. Inside a graph it is the graph's memory.
        shape = len(Phase) * (len(Tier) + 1)
        counters = torch.zeros(shape, dtype=torch.int64, device=selected.device)
        self.counted = counters[: len(Phase) * len(Tier)].view(len(Phase), len(Tier))
        self.fetched = counters[len(Phase) * len(Tier) :]
        self.marks.zero_()

    def resolve(self, staging_rows: int) -> Resolution:
        num_tokens, size = self.selected.shape[0], self.selected.numel()
        self._mark_selections()
        step = self._take_bitmap("step")
        self._count(self.marks, len(Phase), step)
        capacity = min(size, self.tables.sizes.host_rows)
        if self.queries.most_rows is not None:
            capacity = min(capacity, self.queries.most_rows)
        if capacity > staging_rows:
            capacity = self._size_of(step)
        found = self._list(step, capacity, "step")
        self._look_up(found, step)
        if capacity <= staging_rows:
            plans = [self._plan(0, num_tokens, found, step)]
        else:
            plans = self._serve_in_passes(found, step, staging_rows)
        return Resolution(tuple(plans), self.counted, self.fetched)

    def _serve_in_passes(self, found: _Found, step: _Bitmap, staging_rows: int) -> list[Plan]:
        num_tokens, top_k = self.selected.shape
        self.fetched.zero_()
        pending = self.scratch.take("pending", found.fetch.numel(), dtype=torch.uint8)
        pending.copy_(found.fetch)
        bitmap = self._take_bitmap("pass")
        plans: list[Plan] = []
        first = 0
        while first < num_tokens:
            least = min(first + staging_rows // top_k, num_tokens)

            def size(last: int, first: int = first) -> int:
                return self._size_of_pass(first, last, bitmap)

            last = least + bisect_right(range(least + 1, num_tokens + 1), staging_rows, key=size)
            part = self._list(bitmap, size(last), f"pass {len(plans)}")
            self._pick(part, found, step, pending)
            plans.append(self._plan(first, last, part, bitmap))
            first = last
        return plans

    def _size_of_pass(self, first: int, last: int, bitmap: _Bitmap) -> int:
        """Fill the bitmap with the rows of some tokens; return how many there are."""
        marks = self._int32s("marks of pass", self.num_words).zero_()
        rows = self.rows[first:last]
        union.mark_rows[self._grid(rows.numel(), shapes.SELECTIONS)](
            rows, marks, rows.numel(), BLOCK=shapes.SELECTIONS
        )
        self._count(marks, 1, bitmap)
        return self._size_of(bitmap)

    def _size_of(self, bitmap: _Bitmap) -> int:
        if bitmap.counts.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a graph is captured for {self.selected.numel()} selections, which may be more "
                "rows than staging holds; raise dhisparse.staging_rows"
            )
        return int(bitmap.counts.sum())

    def _mark_selections(self) -> None:
        size, table = self.selected.numel(), self.queries.block_table
        if size:
            union.mark_selections[self._grid(size, shapes.SELECTIONS)](
                self.selected,
                self.queries.request_of_token,
                self.queries.visible,
                self.is_prefill,
                table,
                self.tables.page_of_block,
                self.rows,
                self.marks,
                self.tables.errors,
                self.selected.stride(0),
                table.stride(0),
                table.shape[1],
                self.tables.sizes.num_blocks,
                self.tables.sizes.page_rows,
                self.selected.shape[1],
                size,
                self.num_words,
                BLOCK=shapes.SELECTIONS,
            )

    def _count(self, marks: torch.Tensor, phases: int, bitmap: _Bitmap) -> None:
        if self.num_words:
            union.count_rows[self._grid(self.num_words)](
                marks,
                bitmap.words,
                bitmap.counts,
                self.num_words,
                PHASES=phases,
                BLOCK=shapes.TILE,
            )

    def _list(self, bitmap: _Bitmap, capacity: int, name: str) -> _Found:
        found = _Found(
            self._int32s(f"{name} rows", capacity).fill_(NO_ROW),
            self._int32s(f"{name} slot", capacity),
            self.scratch.take(f"{name} tier", capacity, dtype=torch.uint8),
            self.scratch.take(f"{name} fetch", capacity, dtype=torch.uint8),
        )
        if capacity:
            union.list_rows[self._grid(self.num_words)](
                bitmap.words,
                bitmap.counts,
                found.rows,
                bitmap.ranks,
                self.tables.errors,
                self.num_words,
                bitmap.counts.numel(),
                capacity,
                BLOCK=shapes.TILE,
                SUM_BLOCK=shapes.SUM_BLOCK,
            )
        return found

    def _look_up(self, found: _Found, step: _Bitmap) -> None:
        """Find the rows, and let those in that are missing and enter the cache."""
        capacity, tables = found.rows.numel(), self.tables
        if capacity == 0:
            return
        slot_of_row, _, age, _ = self.group
        (num_tiles,) = grid = self._grid(capacity)
        missing = self._int32s("missing", num_tiles)
        lookup.look_up[grid](
            found.rows,
            self.generation,
            slot_of_row,
            tables.unit_state,
            age,
            found.slot,
            found.tier,
            found.fetch,
            missing,
            self.fetched,
            capacity,
            UNIT_ROWS=UNIT_ROWS,
            MAX_AGE=MAX_AGE,
            BLOCK=shapes.TILE,
        )
        if tables.sizes.num_slots:
            self._let_in(found, step, missing)

    def _let_in(self, found: _Found, step: _Bitmap, missing: torch.Tensor) -> None:
        slot_of_row, row_of_slot, age, hand = self.group
        num_slots = row_of_slot.numel()
        (num_tiles,) = grid = self._grid(num_slots)
        counts = self._int32s("class counts", replacement.CLASSES.value * num_tiles)
        taken = self._int32s("taken", found.rows.numel())
        sweep = self._int32s("sweep", 2)
        slots = (step.words, row_of_slot, age, self.tables.unit_state, hand)
        shape: dict[str, Any] = {
            "UNIT_ROWS": UNIT_ROWS,
            "REQUIRED": int(UnitState.REQUIRED),
            "BLOCK": shapes.TILE,
            "SUM_BLOCK": shapes.SUM_BLOCK,
        }
        replacement.count_classes[grid](
            missing, *slots, counts, missing.numel(), num_slots, **shape
        )
        replacement.take_slots[grid](
            missing,
            *slots,
            counts,
            taken,
            sweep,
            missing.numel(),
            num_slots,
            FRESH_AGE=FRESH_AGE,
            num_warps=shapes.TAKING_WARPS,
            **shape,
        )
        replacement.move_in[(missing.numel(),)](
            found.rows,
            self.generation,
            found.fetch,
            missing,
            taken,
            sweep,
            slot_of_row,
            row_of_slot,
            hand,
            found.slot,
            found.rows.numel(),
            BLOCK=shapes.TILE,
            SUM_BLOCK=shapes.SUM_BLOCK,
        )

    def _pick(self, part: _Found, found: _Found, step: _Bitmap, pending: torch.Tensor) -> None:
        """Look up the rows of a pass among those of the step."""
        capacity = part.rows.numel()
        if capacity:
            lookup.pick_rows[self._grid(capacity)](
                part.rows,
                self.generation,
                step.words,
                step.ranks,
                found.slot,
                found.tier,
                pending,
                part.slot,
                part.tier,
                part.fetch,
                self.fetched,
                capacity,
                BLOCK=shapes.TILE,
            )

    def _plan(self, first: int, last: int, found: _Found, bitmap: _Bitmap) -> Plan:
        rows = self.rows[first:last]
        if rows.numel():
            remapping.remap_rows[self._grid(rows.numel(), shapes.SELECTIONS)](
                rows,
                self.queries.request_of_token[first:last],
                self.is_prefill,
                bitmap.words,
                bitmap.ranks,
                found.tier,
                self.counted,
                rows.shape[1],
                rows.numel(),
                PHASES=len(Phase),
                TIERS=len(Tier),
                BLOCK=shapes.SELECTIONS,
            )
        return Plan(first, last, found.rows, found.slot, found.fetch.view(torch.bool), rows)

    def _take_bitmap(self, name: str) -> _Bitmap:
        (num_tiles,) = self._grid(self.num_words)
        return _Bitmap(
            self._int32s(f"{name} words", self.num_words),
            self._int32s(f"{name} ranks", self.num_words),
            self._int32s(f"{name} counts", num_tiles),
        )

    def _int32s(self, name: str, size: int) -> torch.Tensor:
        return self.scratch.take(name, size, dtype=torch.int32)

    @staticmethod
    def _grid(size: int, block: int | None = None) -> tuple[int]:
        return (-(-size // (block or shapes.TILE)),)
