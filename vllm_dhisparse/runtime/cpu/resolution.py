"""From the selections of a step to its plans. Kernels in ``union``, ``replacement``, ``passes``."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_dhisparse.runtime.cpu import passes, remapping, replacement, union
from vllm_dhisparse.runtime.cpu.state import Found, Int32s, Kept, Words, asked_of, cache_of
from vllm_dhisparse.runtime.plan import Phase, Plan, Queries, Resolution, Tier
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables

_SPARE_ROWS = 4  # what union.list_rows may write beyond the last row


def resolve(
    selected: torch.Tensor,
    queries: Queries,
    tables: Tables,
    index_group: int,
    staging_rows: int,
    scratch: Scratch,
) -> Resolution:
    assert selected.dtype == torch.int32
    assert selected.shape[1] <= staging_rows, "staging holds less than one query's rows"
    assert selected.shape[1] < 2**16, "top_k above what the counters hold"
    return _Resolver(selected, queries, tables, index_group, scratch).resolve(staging_rows)


class _Rows(NamedTuple):
    """``Found`` as tensors."""

    rows: torch.Tensor
    slot: torch.Tensor
    tier: torch.Tensor
    fetch: torch.Tensor

    def part(self, first: int, last: int) -> "_Rows":
        """Return the rows ``first .. last``."""
        return _Rows(*(field[first:last] for field in self))

    def arrays(self) -> Found:
        """View the rows as arrays."""
        rows, slot, tier, fetch = self
        return Found(rows.numpy(), slot.numpy(), tier.numpy(), fetch.view(torch.uint8).numpy())


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
        self.asked = asked_of(selected, queries, tables)
        self.cache = cache_of(tables, index_group)
        self.scratch = scratch
        self.num_words = tables.sizes.host_rows // UNIT_ROWS
        width = queries.block_table.shape[1] * tables.sizes.page_rows // UNIT_ROWS
        self.positions = self._words("positions", width)
        self.position_ranks = self._int32s("position_ranks", width)
        self.rank_of_word = self._int32s("rank_of_word", self.num_words)
        self.remap = scratch.take("remap", *selected.shape, dtype=torch.int32)
        self.union = self._bitmap("union")
        all_kept = not queries.is_prefill.any()
        self.kept = Kept(self.union if all_kept else self._bitmap("kept"), all_kept)
        self.selected = torch.zeros(len(Phase), len(Tier), dtype=torch.int64)
        self.fetched = torch.zeros(len(Phase), dtype=torch.int64)

    def resolve(self, staging_rows: int) -> Resolution:
        num_tokens = self.remap.shape[0]
        self._mark(0, num_tokens, self.union, self.kept)
        num_rows = union.count(self.union)
        step = self._list(self.union, self._take_rows("step", num_rows + _SPARE_ROWS), num_rows)
        found, missing = step.arrays(), self._int32s("missing", num_rows)
        number, others = union.look_up(found, self.kept, self.cache, missing)
        taken = self._int32s("taken", number)
        replacement.let_in(found, missing[:number], taken, self.cache)
        if num_rows <= staging_rows:
            plans = [self._plan(0, num_tokens, step, self.union)]
            self.fetched[Phase.GENERATION], self.fetched[Phase.PREFILL] = number, others
        else:
            plans = self._serve_in_passes(found, staging_rows)
        return Resolution(tuple(plans), self.selected, self.fetched)

    def _serve_in_passes(self, found: Found, staging_rows: int) -> list[Plan]:
        bitmap = self._bitmap("union_of_pass")
        lasts, sizes = np.empty((2, self.remap.shape[0]), dtype=np.int32)
        number = passes.split(self.asked, staging_rows, bitmap, lasts, sizes)
        space = self._take_rows("pass", int(sizes[:number].sum()) + _SPARE_ROWS)
        pending = found.fetch.copy()
        plans, first, start = [], 0, 0
        for last, size in zip(lasts[:number].tolist(), sizes[:number].tolist(), strict=True):
            bitmap.fill(0)
            self._mark(first, last, bitmap, Kept(bitmap, True))
            part = self._list(bitmap, space.part(start, start + size + _SPARE_ROWS), size)
            passes.pick(part.arrays(), found, pending)
            fetched, others = passes.count_fetches(part.arrays(), self.kept)
            self.fetched[Phase.GENERATION] += fetched
            self.fetched[Phase.PREFILL] += others
            plans.append(self._plan(first, last, part, bitmap))
            first, start = last, start + size
        return plans

    def _mark(self, first: int, last: int, bitmap: Words, kept: Kept) -> None:
        complete = union.mark(self.asked, first, last, self.positions, bitmap, kept)
        assert complete, "a row is selected without a host page"

    def _list(self, bitmap: Words, space: _Rows, size: int) -> _Rows:
        union.list_rows(bitmap, space.rows.numpy(), self.rank_of_word)
        return space.part(0, size)

    def _plan(self, first: int, last: int, rows: _Rows, bitmap: Words) -> Plan:
        found, part = rows.arrays(), self.remap[first:last]
        remapping.remap(
            self.asked,
            first,
            last,
            bitmap,
            self.rank_of_word,
            found,
            self.positions,
            self.position_ranks,
            part.numpy(),
            self.selected.numpy(),
        )
        return Plan(first, last, rows.rows, rows.slot, rows.fetch, part)

    def _take_rows(self, name: str, size: int) -> _Rows:
        return _Rows(
            self.scratch.take(f"{name} rows", size, dtype=torch.int32),
            self.scratch.take(f"{name} slot", size, dtype=torch.int32),
            self.scratch.take(f"{name} tier", size, dtype=torch.uint8),
            self.scratch.take(f"{name} fetch", size, dtype=torch.bool),
        )

    def _int32s(self, name: str, size: int) -> Int32s:
        return self.scratch.take(name, size, dtype=torch.int32).numpy()

    def _words(self, name: str, size: int) -> Words:
        return self.scratch.take(name, size, dtype=torch.int64).numpy().view(np.uint64)

    def _bitmap(self, name: str) -> Words:
        bitmap = self._words(name, self.num_words)
        bitmap.fill(0)
        return bitmap
