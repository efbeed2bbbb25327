"""Counts of one worker on CUDA: summed on the device, read when the device has come that far."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_dhisparse.core.working_set import Usage
from vllm_dhisparse.integration.cuda.metadata import CudaMetadata
from vllm_dhisparse.integration.row_counters import RowTotals
from vllm_dhisparse.integration.stats import DHiSparseStats
from vllm_dhisparse.runtime.plan import Phase, Resolution, Tier

# Columns of the table.
_SELECTED = slice(0, len(Phase) * len(Tier))
_FETCHED = slice(_SELECTED.stop, _SELECTED.stop + len(Phase))
_WRITTEN, _VERIFIES, _RESTORED, _PASSES, _WIDTH = (_FETCHED.stop + i for i in range(5))


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

    Args:
        counts_rows: whether this rank reports rows, see ``RowCounters``.
        layer_bytes: by index group, bytes of one row in all its layers.
        device: of the steps.

    """

    samples_usage = False  # a graph cannot, and the host would wait

    def __init__(self, counts_rows: bool, layer_bytes: list[int], device: torch.device) -> None:
        self._totals = RowTotals(counts_rows, layer_bytes)
        shape = (len(layer_bytes), _WIDTH)
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._is_cuda = device.type == "cuda"
        self._pending: deque[_Snapshot] = deque()
        self._free: list[_Snapshot] = []
        self._errors = torch.zeros(1, dtype=torch.int32, device=device)
        self._raise_word: Callable[[int], None] = lambda word: None

    def watch(self, errors: torch.Tensor, raise_word: Callable[[int], None]) -> None:
        """Look at an error word with every snapshot, instead of waiting for the device.

        Args:
            errors: [1] int32, on the device.
            raise_word: raises what the bits of a word mean.

        """
        self._errors, self._raise_word = errors, raise_word

    def add_resolution(
        self, resolution: Resolution, metadata: CudaMetadata, index_group: int
    ) -> None:
        """See ``RowCounters``."""
        written = (metadata.request_of_token >= 0).sum()
        self._add(index_group, resolution.selected, resolution.fetched, written, metadata)
        self._table[index_group, _PASSES] += len(resolution.plans) - 1

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
        """Never called: steps are not sampled."""

    def take_usage(self) -> Usage | None:
        """Return None: steps are not sampled."""
        return None

    def add_retrieval(self, metadata: CudaMetadata, passes: int, seconds: float) -> None:
        """Do nothing: the host sees when a copy is asked for, not how long it takes."""

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
        return _Snapshot(
            torch.empty(self._table.shape, dtype=torch.int64, pin_memory=self._is_cuda),
            torch.empty(1, dtype=torch.int32, pin_memory=self._is_cuda),
            torch.cuda.Event() if self._is_cuda else None,  # type: ignore[no-untyped-call]
        )

    def _read(self) -> None:
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            snapshot = self._pending.popleft()
            self._free.append(snapshot)
            self._raise_word(int(snapshot.errors))
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
