"""The KV connector: what scheduler and workers tell each other, and vLLM's /metrics.

vLLM builds one instance in the engine and one in each worker. It loads and saves
nothing by itself; the hooks about transfers are empty.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from vllm_dhisparse.integration.residency import residency_bytes
from vllm_dhisparse.integration.stats import DHiSparsePromMetrics, DHiSparseStats
from vllm_dhisparse.metrics import PHASES, RESIDENCY_BYTES, SELECTED_ROWS

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class StepMetadata(KVConnectorMetadata):
    """What one step tells the workers. Residency ``resident`` has nothing to say."""


class DHiSparseConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries step commands and statistics of one engine."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._stats = DHiSparseStats()
        # Latent rows are the same on every tensor-parallel rank, so one rank counts them.
        self._counts = role is KVConnectorRole.WORKER and get_tensor_model_parallel_rank() == 0

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed to another instance when a request ends."""
        return False

    # Worker

    def count_selected(self, selected: torch.Tensor, token_phase: torch.Tensor) -> None:
        """Count one index group's selection.

        Args:
            selected: [num_tokens, index_topk] int32, -1 = unused place.
            token_phase: [num_tokens] int64 - index into `metrics.PHASES`.

        """
        if not self._counts:
            return
        rows = (selected >= 0).sum(dim=1)
        per_phase = torch.bincount(token_phase, weights=rows, minlength=len(PHASES))
        for phase, amount in zip(PHASES, per_phase.tolist(), strict=True):
            if amount:
                self._stats.add(SELECTED_ROWS.key("tail", phase), int(amount))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return no tokens: history comes back through vLLM's own prefix cache."""
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Nothing to note."""

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Return this step's message to the workers."""
        return StepMetadata()

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        return False, None

    # Statistics, both sides

    def get_kv_connector_stats(self) -> DHiSparseStats | None:
        """Return what happened since the last call."""
        if self.role is KVConnectorRole.SCHEDULER:
            assert self._kv_cache_manager is not None
            return DHiSparseStats({"counters": {}, "gauges": self._levels(self._kv_cache_manager)})
        if self._stats.is_empty():
            return None
        report, self._stats = self._stats, DHiSparseStats()
        return report

    def _levels(self, manager: "KVCacheManager") -> dict[str, float]:
        sizes = residency_bytes(manager, self._kv_cache_config)
        return {RESIDENCY_BYTES.key(use): float(size) for use, size in sizes.items()}

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DHiSparseStats:
        """Rebuild statistics that crossed a process border."""
        return DHiSparseStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DHiSparsePromMetrics:
        """Build the Prometheus families in the API server."""
        return DHiSparsePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
