"""Counts of one worker: rows by where they were found, and bytes moved."""

from time import perf_counter
from typing import Any, Protocol

import torch

from vllm_dhisparse.core.working_set import Usage
from vllm_dhisparse.integration.metadata import DHiSparseMetadata
from vllm_dhisparse.integration.stats import DHiSparseStats
from vllm_dhisparse.metrics import (
    EXTRA_PASSES,
    FETCHED_ROWS,
    RETRIEVAL_SECONDS,
    SAMPLED_HITS,
    SELECTED_ROWS,
    STAGING_ACQUIRES,
    TRANSFER_BYTES,
    UNION_ROWS,
)
from vllm_dhisparse.runtime.plan import Phase, Resolution, Tier


class RowCounters(Protocol):
    """What happened on a worker since it was last taken; metadata is that of its device."""

    samples_usage: bool
    """Whether sampled steps are looked at with a ``UsageProbe``, which waits for the device."""

    def begin_step(self) -> None:
        """Note that a step starts; once a step, before anything of it is counted."""

    def add_resident(self, selected: torch.Tensor, metadata: Any, index_group: int) -> None:
        """Count one index group's selection where all rows are in vLLM's own blocks.

        Args:
            selected: [num_tokens, index_topk] int32, -1 = unused place.
            metadata: the batch.
            index_group: of the selection.

        """

    def before_resolution(self, index_group: int) -> None:
        """Note what an index group holds before its selection is resolved."""

    def add_resolution(self, resolution: Resolution, metadata: Any, index_group: int) -> None:
        """Count one index group's step.

        Args:
            resolution: rows by tier.
            metadata: the batch.
            index_group: of the selection.

        """

    def add_restored(self, num_rows: torch.Tensor) -> None:
        """Count rows restored outside any step's plan: [index_groups] int64, in each layer."""

    def take_stats(self) -> DHiSparseStats | None:
        """Return the counters for /metrics, and start again."""

    def take_fetched(self) -> int:
        """Return the rows fetched for decode and verify by the index group that fetched most.

        To be taken in each step; starts again.
        """

    def add_usage(self, usage: Usage) -> None:
        """Note what one index group used in a step that is sampled."""

    def take_usage(self) -> Usage | None:
        """Return what a sampled step used, once."""

    def start_clock(self, index_group: int, is_leader: bool) -> None:
        """Note that a layer begins to resolve or to bring rows."""

    def stop_clock(self, metadata: Any, index_group: int, is_leader: bool) -> None:
        """Count one use of staging by a layer, and the time since its clock started."""


class RowTotals:
    """Sums of one worker on the host.

    Args:
        counts_rows: whether this rank reports rows. Latent rows are the same on every
            tensor-parallel rank, so only one does; bytes are every rank's own.
        layer_bytes: by index group, bytes of one row in all its layers.

    """

    def __init__(self, counts_rows: bool, layer_bytes: list[int]) -> None:
        self._counts_rows = counts_rows
        self._layer_bytes = layer_bytes
        self._stats = DHiSparseStats()
        self._fetched = 0
        self._usage: Usage | None = None
        self._fetched_in_step = 0

    def begin_step(self) -> None:
        """Close the step before: of its index groups, the one that fetched most counts."""
        self._fetched += self._fetched_in_step
        self._fetched_in_step = 0

    def add_rows(
        self,
        index_group: int,
        selected: torch.Tensor,
        fetched: torch.Tensor,
        num_written: int,
        verifies: bool,
        extra_passes: int = 0,
    ) -> None:
        """Count one index group's step.

        Args:
            index_group: of the selection.
            selected: [phases, tiers] int64, see ``runtime.plan.Resolution``.
            fetched: [phases] int64.
            num_written: rows written through to the host.
            verifies: whether generation was verification of drafts.
            extra_passes: times that staging was filled again.

        """
        self._fetched_in_step = max(self._fetched_in_step, int(fetched[Phase.GENERATION]))
        layer_bytes = self._layer_bytes[index_group]
        self._add_bytes("host_to_device", int(fetched.sum()) * layer_bytes)
        self._add_bytes("device_to_host", num_written * layer_bytes)
        if not self._counts_rows:
            return
        if extra_passes:
            self._stats.add(EXTRA_PASSES.key(), extra_passes)
        for phase in Phase:
            name = "verify" if verifies else "decode"
            name = "prefill" if phase is Phase.PREFILL else name
            for tier, amount in zip(Tier, selected[phase].tolist(), strict=True):
                self._stats.add(SELECTED_ROWS.key(tier.name.lower(), name), amount)
            self._stats.add(FETCHED_ROWS.key(name), int(fetched[phase]))

    def add_restored(self, num_rows: list[int]) -> None:
        """Count rows of each index group that were restored in each of its layers."""
        pairs = zip(num_rows, self._layer_bytes, strict=True)
        self._add_bytes("host_to_device", sum(rows * size for rows, size in pairs))

    def take_stats(self) -> DHiSparseStats | None:
        """Return the counters for /metrics, and start again."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, DHiSparseStats()
        return stats

    def take_fetched(self) -> int:
        """Return the rows fetched for decode and verify, and start again."""
        self.begin_step()
        fetched, self._fetched = self._fetched, 0
        return fetched

    def take_usage(self) -> Usage | None:
        """Return what a sampled step used, once."""
        usage, self._usage = self._usage, None
        return usage

    def add_usage(self, usage: Usage) -> None:
        """Note what one index group used in a step that is sampled."""
        self._usage = usage
        if self._counts_rows:
            for age, rows in enumerate(usage.hit_ages):
                self._stats.add(SAMPLED_HITS.key(str(age)), rows)
            for rows in usage.union_rows:
                self._stats.observe(UNION_ROWS.key(), rows)

    def add_retrieval(self, phase: str, passes: int, seconds: float) -> None:
        """Count uses of staging, and the time that they took."""
        if self._counts_rows:
            self._stats.add(STAGING_ACQUIRES.key(phase), passes)
            self._stats.add(RETRIEVAL_SECONDS.key(phase), seconds)

    def _add_bytes(self, direction: str, amount: int) -> None:
        if amount:
            self._stats.add(TRANSFER_BYTES.key(direction), amount)


class HostRowCounters:
    """Row counters of a worker whose device is the host; see ``RowTotals``."""

    samples_usage = True

    def __init__(self, counts_rows: bool, layer_bytes: list[int]) -> None:
        self._totals = RowTotals(counts_rows, layer_bytes)
        self._started = 0.0

    def begin_step(self) -> None:
        """See ``RowCounters``."""
        self._totals.begin_step()

    def add_resident(
        self, selected: torch.Tensor, metadata: DHiSparseMetadata, index_group: int
    ) -> None:
        """See ``RowCounters``."""
        rows = (selected >= 0).sum(dim=1)
        is_prefill = metadata.is_prefill[metadata.token_request]
        counts = torch.zeros(len(Phase), len(Tier), dtype=torch.int64)
        counts[Phase.PREFILL, Tier.TAIL] = rows[is_prefill].sum()
        counts[Phase.GENERATION, Tier.TAIL] = rows[~is_prefill].sum()
        fetched = torch.zeros(len(Phase), dtype=torch.int64)
        self._totals.add_rows(index_group, counts, fetched, 0, metadata.verifies)

    def add_resolution(
        self, resolution: Resolution, metadata: DHiSparseMetadata, index_group: int
    ) -> None:
        """See ``RowCounters``."""
        self._totals.add_rows(
            index_group,
            resolution.selected,
            resolution.fetched,
            metadata.num_actual_tokens,
            metadata.verifies,
            len(resolution.plans) - 1,
        )

    def add_restored(self, num_rows: torch.Tensor) -> None:
        """See ``RowCounters``."""
        self._totals.add_restored(num_rows.tolist())

    def take_stats(self) -> DHiSparseStats | None:
        """See ``RowCounters``."""
        return self._totals.take_stats()

    def take_fetched(self) -> int:
        """See ``RowCounters``."""
        return self._totals.take_fetched()

    def add_usage(self, usage: Usage) -> None:
        """See ``RowCounters``."""
        self._totals.add_usage(usage)

    def take_usage(self) -> Usage | None:
        """See ``RowCounters``."""
        return self._totals.take_usage()

    def before_resolution(self, index_group: int) -> None:
        """Nothing: sampled steps have a probe."""

    def start_clock(self, index_group: int, is_leader: bool) -> None:
        """See ``RowCounters``."""
        self._started = perf_counter()

    def stop_clock(self, metadata: DHiSparseMetadata, index_group: int, is_leader: bool) -> None:
        """See ``RowCounters``."""
        generation = "verify" if metadata.verifies else "decode"
        phase = "prefill" if metadata.is_prefill.all() else generation
        self._totals.add_retrieval(phase, 1, perf_counter() - self._started)
