"""Counts of one worker: rows by where they were found, and bytes moved."""

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


class RowCounters:
    """What happened since it was last taken.

    Args:
        counts_rows: whether this rank reports rows. Latent rows are the same on every
            tensor-parallel rank, so only one does; bytes are every rank's own.

    """

    def __init__(self, counts_rows: bool) -> None:
        self._counts_rows = counts_rows
        self._stats = DHiSparseStats()
        self._fetched = 0
        self._usage: Usage | None = None

    def take_stats(self) -> DHiSparseStats | None:
        """Return the counters for /metrics, and start again."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, DHiSparseStats()
        return stats

    def take_fetched(self) -> int:
        """Return the rows fetched for decode and verify by the index group that fetched most.

        To be taken in each step; starts again.
        """
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

    def add_resident(self, selected: torch.Tensor, metadata: DHiSparseMetadata) -> None:
        """Count one index group's selection where all rows are in vLLM's own blocks.

        Args:
            selected: [num_tokens, index_topk] int32, -1 = unused place.
            metadata: the batch.

        """
        rows = (selected >= 0).sum(dim=1)
        is_prefill = metadata.is_prefill[metadata.token_request]
        counts = torch.zeros(len(Phase), len(Tier), dtype=torch.int64)
        counts[Phase.PREFILL, Tier.TAIL] = rows[is_prefill].sum()
        counts[Phase.GENERATION, Tier.TAIL] = rows[~is_prefill].sum()
        self._add_rows(counts, torch.zeros(len(Phase), dtype=torch.int64), metadata)

    def add_resolution(
        self,
        resolution: Resolution,
        metadata: DHiSparseMetadata,
        layer_bytes: int,
    ) -> None:
        """Count one index group's step.

        Args:
            resolution: rows by tier.
            metadata: the batch.
            layer_bytes: bytes of one row in all layers of the group.

        """
        self._add_rows(resolution.selected, resolution.fetched, metadata)
        if self._counts_rows and len(resolution.plans) > 1:
            self._stats.add(EXTRA_PASSES.key(), len(resolution.plans) - 1)
        self._fetched = max(self._fetched, int(resolution.fetched[Phase.GENERATION]))
        moved = {
            "host_to_device": int(resolution.fetched.sum()) * layer_bytes,
            "device_to_host": metadata.num_actual_tokens * layer_bytes,
        }
        for direction, amount in moved.items():
            self._stats.add(TRANSFER_BYTES.key(direction), amount)

    def add_restored(self, num_bytes: int) -> None:
        """Count bytes of spans that were restored outside any step's plan."""
        if num_bytes:
            self._stats.add(TRANSFER_BYTES.key("host_to_device"), num_bytes)

    def add_retrieval(self, metadata: DHiSparseMetadata, passes: int, seconds: float) -> None:
        """Count the use of staging by one layer, and the time it took to fill it."""
        if self._counts_rows:
            phase = "prefill" if metadata.is_prefill.all() else _generation(metadata)
            self._stats.add(STAGING_ACQUIRES.key(phase), passes)
            self._stats.add(RETRIEVAL_SECONDS.key(phase), seconds)

    def _add_rows(
        self, selected: torch.Tensor, fetched: torch.Tensor, metadata: DHiSparseMetadata
    ) -> None:
        if not self._counts_rows:
            return
        for phase in Phase:
            name = "prefill" if phase is Phase.PREFILL else _generation(metadata)
            for tier, amount in zip(Tier, selected[phase].tolist(), strict=True):
                self._stats.add(SELECTED_ROWS.key(tier.name.lower(), name), amount)
            self._stats.add(FETCHED_ROWS.key(name), int(fetched[phase]))


def _generation(metadata: DHiSparseMetadata) -> str:
    return "verify" if metadata.verifies else "decode"
