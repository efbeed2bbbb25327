"""From the selections of a step to its plans. Kernels in ``union``, ``replacement``, ``passes``."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dhisparse.runtime.cpu import passes, replacement, union
from vllm_dhisparse.runtime.plan import Phase, Plan, Queries, Resolution, Tier
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables

_SPARE_ROWS = 4  # what union.list_rows may write beyond the last row


class _Selections(NamedTuple):
    """The step's input as the kernels take it."""

    selected: NDArray[np.int32]
    request_of_token: NDArray[np.int32]
    visible: NDArray[np.int32]
    block_table: NDArray[np.int32]
    page_of_block: NDArray[np.int32]
    page_rows: int
    is_prefill: NDArray[np.uint8]


class _Rows(NamedTuple):
    """Distinct rows, ascending, and what is known about each; see ``Plan``."""

    rows: torch.Tensor
    slot: torch.Tensor
    tier: torch.Tensor
    fetch: torch.Tensor

    def numpy(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
        """Return all fields as arrays, ``fetch`` in bytes."""
        fetch = self.fetch.view(torch.uint8)
        return self.rows.numpy(), self.slot.numpy(), self.tier.numpy(), fetch.numpy()


def resolve(
    selected: torch.Tensor,
    queries: Queries,
    tables: Tables,
    index_group: int,
    staging_rows: int,
    scratch: Scratch,
) -> Resolution:
    return _Resolver(selected, queries, tables, index_group, scratch).resolve(staging_rows)


class _Resolver:
    """One step of one index group; holds views and scratch, no state of its own."""

    def __init__(
        self,
        selected: torch.Tensor,
        queries: Queries,
        tables: Tables,
        index_group: int,
        scratch: Scratch,
    ) -> None:
        assert selected.dtype == torch.int32
        assert selected.shape[1] < 2**16, "top_k above what the counters hold"
        self.input = _Selections(
            selected.numpy(),
            queries.request_of_token.numpy(),
            queries.visible.numpy(),
            queries.block_table.numpy(),
            tables.page_of_block.numpy(),
            tables.sizes.page_rows,
            queries.is_prefill.view(torch.uint8).numpy(),
        )
        self.tables = tables
        self.group = tables.group(index_group)
        self.scratch = scratch
        self.page_words = tables.sizes.page_rows // UNIT_ROWS
        self.num_words = tables.sizes.host_rows // UNIT_ROWS
        self.ranks = self._words("rank_of_word", self.num_words, torch.int32)
        width = queries.block_table.shape[1] * self.page_words
        self.positions = self._words("positions", width, torch.int64).view(np.uint64)
        self.position_ranks = self._words("position_ranks", width, torch.int32)
        self.selected = torch.zeros(len(Phase), len(Tier), dtype=torch.int64)
        self.fetched = torch.zeros(len(Phase), dtype=torch.int64)
        self.all_kept = not queries.is_prefill.any()

    def resolve(self, staging_rows: int) -> Resolution:
        num_tokens, top_k = self.input.selected.shape
        assert staging_rows >= top_k, "staging holds less than one query's rows"
        bitmap = self._bitmap("union")
        self.kept = bitmap if self.all_kept else self._bitmap("kept")
        self._mark(0, num_tokens, bitmap)
        found = self._list("", bitmap)
        self._let_in(found)
        remap = self.scratch.take("remap", num_tokens, top_k, dtype=torch.int32)
        if found.rows.numel() <= staging_rows:
            plans = [self._plan(0, num_tokens, found, bitmap, remap)]
        else:
            plans = self._serve_in_passes(found, staging_rows, remap)
        return Resolution(tuple(plans), self.selected, self.fetched)

    def _serve_in_passes(self, found: _Rows, staging_rows: int, remap: torch.Tensor) -> list[Plan]:
        bitmap = self._bitmap("union_of_pass")
        num_tokens = remap.shape[0]
        lasts = np.empty(num_tokens, dtype=np.int32)
        sizes = np.empty(num_tokens, dtype=np.int32)
        number = passes.split(*self.input[:6], staging_rows, bitmap, lasts, sizes)
        space = self._take_rows("pass_", int(sizes[:number].sum()))
        pending = found.fetch.clone().view(torch.uint8).numpy()
        plans, first, start = [], 0, 0
        for last, size in zip(lasts[:number].tolist(), sizes[:number].tolist(), strict=True):
            bitmap.fill(0)
            self._mark(first, last, bitmap)
            part = _Rows(*(field[start : start + size + _SPARE_ROWS] for field in space))
            union.list_rows(bitmap, part.rows.numpy(), self.ranks)
            part = _Rows(*(field[:size] for field in part))
            rows, slot, tier, fetch = part.numpy()
            passes.pick(rows, *found.numpy()[:3], pending, slot, tier, fetch)
            plans.append(self._plan(first, last, part, bitmap, remap))
            first, start = last, start + size
        return plans

    def _mark(self, first: int, last: int, bitmap: NDArray[np.uint64]) -> None:
        selected, request, visible, block_table, page_of_block, _, is_prefill = self.input
        complete = union.mark(
            selected,
            first,
            last,
            request,
            visible,
            block_table,
            page_of_block,
            self.page_words,
            is_prefill,
            self.positions,
            bitmap,
            self.kept,
        )
        assert complete, "a row is selected without a host page"

    def _list(self, name: str, bitmap: NDArray[np.uint64]) -> _Rows:
        size = union.count(bitmap)
        space = self._take_rows(name, size)
        union.list_rows(bitmap, space.rows.numpy(), self.ranks)
        found = _Rows(*(field[:size] for field in space))
        union.look_up(
            found.rows.numpy(),
            self.kept,
            self.all_kept,
            self.group.slot_of_row.numpy(),
            self.group.slot_of_row.data_ptr(),
            self.tables.unit_state.numpy(),
            self.group.age.numpy(),
            *found.numpy()[1:],
        )
        return found

    def _let_in(self, found: _Rows) -> None:
        rows, slot, _, missing = found.numpy()
        replacement.let_in(
            rows,
            missing,
            self.kept,
            self.all_kept,
            slot,
            self.group.slot_of_row.numpy(),
            self.group.row_of_slot.numpy(),
            self.group.age.numpy(),
            self.group.hand.numpy(),
            self.tables.unit_state.numpy(),
        )

    def _plan(
        self,
        first: int,
        last: int,
        found: _Rows,
        bitmap: NDArray[np.uint64],
        remap: torch.Tensor,
    ) -> Plan:
        selected, request, visible, block_table, page_of_block, _, is_prefill = self.input
        rows, _, tier, fetch = found.numpy()
        part = remap[first:last]
        union.remap(
            selected,
            first,
            last,
            request,
            visible,
            block_table,
            page_of_block,
            self.page_words,
            is_prefill,
            bitmap,
            self.ranks,
            tier,
            self.positions,
            self.position_ranks,
            part.numpy(),
            self.selected.numpy(),
        )
        kept, others = replacement.count_kept(rows, fetch, self.kept, self.all_kept)
        self.fetched[Phase.GENERATION] += kept
        self.fetched[Phase.PREFILL] += others
        return Plan(first, last, found.rows, found.slot, found.fetch, part)

    def _take_rows(self, name: str, size: int) -> _Rows:
        size += _SPARE_ROWS
        return _Rows(
            self.scratch.take(f"{name}rows", size, dtype=torch.int32),
            self.scratch.take(f"{name}slot", size, dtype=torch.int32),
            self.scratch.take(f"{name}tier", size, dtype=torch.uint8),
            self.scratch.take(f"{name}fetch", size, dtype=torch.bool),
        )

    def _words(self, name: str, size: int, dtype: torch.dtype) -> NDArray[np.int32]:
        return self.scratch.take(name, size, dtype=dtype).numpy()

    def _bitmap(self, name: str) -> NDArray[np.uint64]:
        bitmap = self._words(name, self.num_words, torch.int64).view(np.uint64)
        bitmap.fill(0)
        return bitmap
