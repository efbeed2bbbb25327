"""From the selections of a step to its plans."""

import numpy as np
import torch

from vllm_dhisparse.runtime.cpu import passes
from vllm_dhisparse.runtime.cpu.lookup import look_up
from vllm_dhisparse.runtime.cpu.native import compiled
from vllm_dhisparse.runtime.cpu.remapping import remap
from vllm_dhisparse.runtime.cpu.replacement import let_in
from vllm_dhisparse.runtime.cpu.state import (
    SPARE_ROWS,
    Bitmaps,
    Cache,
    Found,
    Int32s,
    Kept,
    asked_of,
    cache_of,
)
from vllm_dhisparse.runtime.cpu.union import list_rows, mark
from vllm_dhisparse.runtime.plan import Phase, Plan, Queries, Resolution, Tier
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables

_PHASES, _TIERS = len(Phase), len(Tier)


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
        words = tables.sizes.host_rows // UNIT_ROWS
        width = queries.block_table.shape[1] * tables.sizes.page_rows // UNIT_ROWS
        self.bitmaps = Bitmaps(
            scratch.array("union", words, torch.uint64),
            scratch.array("rank_of_word", words, torch.int32),
            scratch.array("position_words", width, torch.uint64),
            scratch.array("position_ranks", width, torch.int32),
        )
        all_kept = not self.asked.is_prefill.any()
        kept = self.bitmaps.union if all_kept else scratch.array("kept", words, torch.uint64)
        self.kept = Kept(kept, all_kept)
        self.remap = scratch.array("remap", selected.numel(), torch.int32).reshape(selected.shape)
        self.selected = np.zeros((_PHASES, _TIERS), dtype=np.int64)
        self.fetched = np.zeros(_PHASES, dtype=np.int64)

    def resolve(self, staging_rows: int) -> Resolution:
        num_tokens = self.remap.shape[0]
        num_rows = self._mark(0, num_tokens, self.bitmaps, self.kept)
        rows = self._take_rows("step", num_rows)
        missing, taken = (
            self.scratch.array(name, num_rows, torch.int32) for name in ("missing", "taken")
        )
        self.fetched[:] = _find(self.bitmaps, self.kept, self.cache, rows, missing, taken)
        if num_rows <= staging_rows:
            plans = [self._plan(0, num_tokens, rows, self.bitmaps)]
        else:
            self.fetched[:] = 0
            plans = self._serve_in_passes(rows, staging_rows)
        return Resolution(
            tuple(plans), torch.from_numpy(self.selected), torch.from_numpy(self.fetched)
        )

    def _serve_in_passes(self, step: Found, staging_rows: int) -> list[Plan]:
        union = self.scratch.array("union_of_pass", self.bitmaps.union.size, torch.uint64)
        bitmaps = self.bitmaps._replace(union=union)
        lasts, sizes = np.empty((2, self.remap.shape[0]), dtype=np.int32)
        number = passes.split(self.asked, staging_rows, union, lasts, sizes)
        space = self._take_rows("pass", int(sizes[:number].sum()))
        pending = step.fetch.copy()
        plans, first, start = [], 0, 0
        for last, size in zip(lasts[:number].tolist(), sizes[:number].tolist(), strict=True):
            end = start + size
            part = Found(
                space.rows[start : end + SPARE_ROWS],
                space.slot[start:end],
                space.tier[start:end],
                space.fetch[start:end],
            )
            self._mark(first, last, bitmaps, Kept(union, True))
            list_rows(union, part.rows, bitmaps.rank_of_word)
            passes.pick(part, step, pending)
            self.fetched += passes.count_fetches(part, self.kept)
            plans.append(self._plan(first, last, part, bitmaps))
            first, start = last, end
        return plans

    def _mark(self, first: int, last: int, bitmaps: Bitmaps, kept: Kept) -> int:
        num_rows = mark(self.asked, first, last, bitmaps, kept)
        assert num_rows >= 0, "a row is selected without a host page"
        return num_rows

    def _plan(self, first: int, last: int, rows: Found, bitmaps: Bitmaps) -> Plan:
        part = self.remap[first:last]
        remap(self.asked, first, last, bitmaps, rows.tier, part, self.selected)
        return Plan(
            first,
            last,
            torch.from_numpy(rows.rows[: rows.slot.size]),
            torch.from_numpy(rows.slot),
            torch.from_numpy(rows.fetch.view(np.bool_)),
            torch.from_numpy(part),
        )

    def _take_rows(self, name: str, size: int) -> Found:
        return Found(
            self.scratch.array(f"{name} rows", size + SPARE_ROWS, torch.int32),
            self.scratch.array(f"{name} slot", size, torch.int32),
            self.scratch.array(f"{name} tier", size, torch.uint8),
            self.scratch.array(f"{name} fetch", size, torch.uint8),
        )


@compiled
def _find(
    bitmaps: Bitmaps, kept: Kept, cache: Cache, found: Found, missing: Int32s, taken: Int32s
) -> tuple[int, int]:
    """Fill ``found`` and let in the rows that are missing and kept; return fetches by phase."""
    list_rows(bitmaps.union, found.rows, bitmaps.rank_of_word)
    number, others = look_up(found, kept, cache, missing)
    let_in(found, missing[:number], taken[:number], cache)
    return number, others
