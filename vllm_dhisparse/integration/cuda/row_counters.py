"""Counts of one worker on CUDA: summed on the device, read when the device has come that far."""

from collections import deque
from typing import Any, NamedTuple

import torch

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.core.working_set import Usage
from vllm_dhisparse.integration.cuda.metadata import CudaMetadata
from vllm_dhisparse.integration.row_counters import RowTotals
from vllm_dhisparse.integration.stats import DHiSparseStats
from vllm_dhisparse.runtime.plan import Phase, Resolution, Tier
from vllm_dhisparse.runtime.tables import Tables

# Columns of the table.
_SELECTED = slice(0, len(Phase) * len(Tier))
_FETCHED = slice(_SELECTED.stop, _SELECTED.stop + len(Phase))
_WRITTEN, _VERIFIES, _RESTORED, _PASSES, _END = (_FETCHED.stop + i for i in range(5))
_AGES = MAX_AGE + 1
_CACHED_AGES = slice(_END, _END + _AGES)
_HIT_AGES = slice(_CACHED_AGES.stop, _CACHED_AGES.stop + _AGES)
_LEADER_TIMES = slice(_HIT_AGES.stop, _HIT_AGES.stop + 2 * len(Phase))
_FOLLOWER_TIMES = slice(_LEADER_TIMES.stop, _LEADER_TIMES.stop + 2 * len(Phase))
_WIDTH = _FOLLOWER_TIMES.stop


class _Snapshot(NamedTuple):
    """``counts``: [index_groups, counters]; ``errors``: [1]; ``event``: None on the host."""

    counts: torch.Tensor
    errors: torch.Tensor
    event: Any


class DeviceRowCounters:
    """Row counters of a worker whose steps may be graphs.

    A graph repeats only what the device does. So layers add to a table on the device,
    [index_groups, counters], and once a step, outside the graph, ``begin_step`` sends the
    table of the step before to the host and clears it.

    Ages of hits and times cost launches, so they are taken in one index group only, the last.
    Times are scaled to all layers.

    Args:
        counts_rows: whether this rank reports rows, see ``RowCounters``.
        layer_bytes: by index group, bytes of one row in all its layers.
        device: of the steps.

    """

    samples_usage = False

    def __init__(self, counts_rows: bool, layer_bytes: list[int], device: torch.device) -> None:
        self._totals = RowTotals(counts_rows, layer_bytes)
        shape = (len(layer_bytes), _WIDTH)
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._is_cuda = device.type == "cuda"
        self._pending: deque[_Snapshot] = deque()
        self._free: list[_Snapshot] = []
        self._errors = torch.zeros(1, dtype=torch.int32, device=device)
        self._started = torch.zeros(1, dtype=torch.int64, device=device)
        self._ages = torch.zeros(0, dtype=torch.uint8, device=device)
        self._ops: Any = None
        self._tables: Tables | None = None
        self._measured = -1
        self._layers_per_leader = self._layers_per_follower = 0.0

    def attach(self, ops: Any, tables: Tables, index_groups: list[int]) -> None:
        """Look at a worker's tables.

        Error words come with every snapshot, so that nothing waits for the device.

        Args:
            ops: the data plane of the device, see ``runtime.triton``.
            tables: the worker's.
            index_groups: of each layer.

        """
        self._ops, self._tables, self._errors = ops, tables, tables.errors
        self._ages = torch.zeros_like(tables.group(0).age)
        self._measured = index_groups[-1]
        leaders = 1 + self._measured
        followers = index_groups.count(self._measured) - 1
        self._layers_per_leader = leaders if followers else len(index_groups)
        self._layers_per_follower = (len(index_groups) - leaders) / max(followers, 1)

    def before_resolution(self, index_group: int) -> None:
        """See ``RowCounters``."""
        if index_group == self._measured:
            counts = self._table[index_group, _CACHED_AGES]
            self._ops.note_ages(self._tables, index_group, self._ages, counts)

    def add_resolution(
        self, resolution: Resolution, metadata: CudaMetadata, index_group: int
    ) -> None:
        """See ``RowCounters``."""
        written = (metadata.request_of_token >= 0).sum()
        self._add(index_group, resolution.selected, resolution.fetched, written, metadata)
        self._table[index_group, _PASSES] += len(resolution.plans) - 1
        if index_group == self._measured:
            self._ops.count_hits(resolution, self._ages, self._table[index_group, _HIT_AGES])

    def add_resident(
        self, selected: torch.Tensor, metadata: CudaMetadata, index_group: int
    ) -> None:
        """See ``RowCounters``."""
        exists = (selected >= 0) & (selected < metadata.visible[:, None])
        rows = exists.sum(dim=1)
        requests = metadata.request_of_token.clamp(min=0).long()
        is_prefill = metadata.is_prefill[requests]
        counts = self._table.new_zeros(len(Phase), len(Tier))
        counts[Phase.PREFILL, Tier.TAIL] = torch.where(is_prefill, rows, 0).sum()
        counts[Phase.GENERATION, Tier.TAIL] = torch.where(is_prefill, 0, rows).sum()
        nothing = self._table.new_zeros(len(Phase))
        self._add(index_group, counts, nothing, nothing[0], metadata)

    def add_restored(self, num_rows: torch.Tensor) -> None:
        """See ``RowCounters``; outside graphs."""
        self._table[:, _RESTORED] += num_rows

    def begin_step(self) -> None:
        """Send the counters of the step before to the host; outside graphs."""
        snapshot = self._free.pop() if self._free else self._new_snapshot()
        snapshot.counts.copy_(self._table, non_blocking=True)
        snapshot.errors.copy_(self._errors, non_blocking=True)
        self._table.zero_()
        if snapshot.event is not None:
            snapshot.event.record()
        self._pending.append(snapshot)

    def take_stats(self) -> DHiSparseStats | None:
        """Return what the device has finished, for /metrics, and start again."""
        self._read()
        return self._totals.take_stats()

    def take_fetched(self) -> int:
        """Return the rows fetched for decode and verify, see ``RowCounters``."""
        self._read()
        return self._totals.take_fetched()

    def add_usage(self, usage: Usage) -> None:
        """Never called: no probe is used."""

    def take_usage(self) -> Usage | None:
        """Return what the device has finished, see ``RowCounters``."""
        self._read()
        return self._totals.take_usage()

    def start_clock(self, index_group: int, is_leader: bool) -> None:
        """See ``RowCounters``."""
        if index_group == self._measured:
            self._ops.start_clock(self._started)

    def stop_clock(self, metadata: CudaMetadata, index_group: int, is_leader: bool) -> None:
        """See ``RowCounters``."""
        if index_group == self._measured:
            columns = _LEADER_TIMES if is_leader else _FOLLOWER_TIMES
            times = self._table[index_group, columns].view(len(Phase), 2)
            self._ops.stop_clock(self._started, metadata.generates, times)

    def _add(
        self,
        index_group: int,
        selected: torch.Tensor,
        fetched: torch.Tensor,
        written: torch.Tensor,
        metadata: CudaMetadata,
    ) -> None:
        row = self._table[index_group]
        row[_SELECTED] += selected.flatten()
        row[_FETCHED] += fetched
        row[_WRITTEN] += written
        row[_VERIFIES] += metadata.verifies[0]

    def _new_snapshot(self) -> _Snapshot:
        """Allocate one; as many exist as steps are ahead of the device."""
        event: Any = torch.cuda.Event  # which has no types
        return _Snapshot(
            torch.empty(self._table.shape, dtype=torch.int64, pin_memory=self._is_cuda),
            torch.empty(1, dtype=torch.int32, pin_memory=self._is_cuda),
            event() if self._is_cuda else None,
        )

    def _read(self) -> None:
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            snapshot = self._pending.popleft()
            self._free.append(snapshot)
            if word := int(snapshot.errors):
                self._ops.raise_word(word)
            counts = snapshot.counts
            self._totals.begin_step()
            for index_group, row in enumerate(counts):
                selected = row[_SELECTED].view(len(Phase), len(Tier))
                self._totals.add_rows(
                    index_group,
                    selected,
                    row[_FETCHED],
                    int(row[_WRITTEN]),
                    bool(row[_VERIFIES]),
                    int(row[_PASSES]),
                )
            self._totals.add_restored(counts[:, _RESTORED].tolist())
            if self._measured >= 0:
                self._read_measured(counts[self._measured])

    def _read_measured(self, row: torch.Tensor) -> None:
        cached, hits = (tuple(row[ages].tolist()) for ages in (_CACHED_AGES, _HIT_AGES))
        if any(cached):
            fetched = int(row[_FETCHED][Phase.GENERATION])
            self._totals.add_usage(Usage(hits, cached, fetched, ()))
        generation = "verify" if row[_VERIFIES] else "decode"
        names = {Phase.PREFILL: "prefill", Phase.GENERATION: generation}
        for columns, scale in (
            (_LEADER_TIMES, self._layers_per_leader),
            (_FOLLOWER_TIMES, self._layers_per_follower),
        ):
            times = row[columns].view(len(Phase), 2).tolist()
            for phase, (nanoseconds, passes) in zip(Phase, times, strict=True):
                if passes:
                    seconds = 1e-9 * scale * nanoseconds
                    self._totals.add_retrieval(names[phase], round(scale * passes), seconds)
