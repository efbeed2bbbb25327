"""The KV connector: vLLM's hooks in engine core and workers, passed on to this package.

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

from vllm_dhisparse.integration.messages import StepMetadata, WorkerReport
from vllm_dhisparse.integration.scheduler_side import SchedulerSide
from vllm_dhisparse.integration.stats import DHiSparsePromMetrics, DHiSparseStats
from vllm_dhisparse.integration.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class DHiSparseConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries step commands and statistics of one engine.

    Attributes:
        scheduler: in the engine core, once its KV cache manager stands.
        worker: in a worker, once its KV cache stands.

    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._is_registered = False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed to another instance when a request ends."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Give every layer the way of its rows, now that the cache stands.

        Raises:
            RuntimeError: this connector serves another engine. vLLM keeps one connector for a
                process, and asks it again for a second engine.

        """
        if self._is_registered:
            raise RuntimeError(
                "another engine in this process still holds the KV connector; shut that one down "
                "first"
            )
        self._is_registered = True
        self.worker = WorkerSide(self._vllm_config, self._kv_cache_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Apply the step's commands. vLLM calls this once a step, before the forward pass.

        On CUDA that is on the stream of the forward pass, after metadata was built.
        """
        super().bind_connector_metadata(connector_metadata)
        assert self.worker is not None
        assert isinstance(connector_metadata, StepMetadata)
        self.worker.begin_step(connector_metadata)

    def shutdown(self) -> None:
        """Let go of host memory, and write what was recorded of requests that still run."""
        if self.worker is not None:
            self.worker.close()

    def build_connector_worker_meta(self) -> WorkerReport:
        """Return what the scheduler's controller needs to know of this step."""
        assert self.worker is not None
        return self.worker.take_report()

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

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Build the scheduler's part of the hierarchy."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler = SchedulerSide(self._vllm_config, self._kv_cache_config, kv_cache_manager)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Note what the workers fetched."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            assert self.scheduler is not None
            self.scheduler.note_report(report)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return no tokens: history comes back through vLLM's own prefix cache."""
        assert self.scheduler is not None
        if self.scheduler.state is not None:
            self.scheduler.state.on_new_request(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Note the blocks of an admitted request."""
        assert self.scheduler is not None
        if self.scheduler.state is not None:
            self.scheduler.state.on_admitted(request, blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Return this step's message to the workers."""
        assert self.scheduler is not None
        return self.scheduler.step_metadata(scheduler_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        return False, None

    # Statistics, both sides

    def get_kv_connector_stats(self) -> DHiSparseStats | None:
        """Return what happened since the last call."""
        if self.scheduler is not None:
            return self.scheduler.take_stats()
        return None if self.worker is None else self.worker.counters.take_stats()

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
