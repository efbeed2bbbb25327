"""The KV connector: what scheduler and workers tell each other, and vLLM's /metrics.

vLLM builds one instance in the engine and one in each worker. It loads and saves
nothing by itself; the hooks about transfers are empty.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dhisparse.core.commands import UNIT_ROWS, StepCommands
from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.core.working_set import Usage, working_set_rows
from vllm_dhisparse.integration.adaptation import (
    adaptation_stats,
    controller_for,
    shortens_drafts,
)
from vllm_dhisparse.integration.attention import DHiSparseImpl
from vllm_dhisparse.integration.draft_ring import DraftRingManager, DraftRingSpec, draft_rings
from vllm_dhisparse.integration.geometry import geometry
from vllm_dhisparse.integration.host_budget import refuse_small_pool
from vllm_dhisparse.integration.layers import HierarchyLayer, ResidentLayer
from vllm_dhisparse.integration.names import HOST_PAGES
from vllm_dhisparse.integration.residency import residency_bytes
from vllm_dhisparse.integration.row_counters import RowCounters
from vllm_dhisparse.integration.scheduler_state import SchedulerState
from vllm_dhisparse.integration.stats import DHiSparsePromMetrics, DHiSparseStats
from vllm_dhisparse.integration.trace_recorder import (
    RecordedStep,
    TraceRecorder,
    record_leaders,
    recorded_step,
)
from vllm_dhisparse.integration.worker_state import WorkerState, index_groups_of
from vllm_dhisparse.metrics import (
    DRAFT_RING_ROWS,
    DRAFT_RING_WRAPS,
    HOST_POOL_BYTES,
    HOST_POOL_PAGES,
    HOST_POOL_WAITS,
    RESIDENCY_BYTES,
    RESIDENCY_ROWS,
    WORKING_SET_ROWS,
)
from vllm_dhisparse.runtime.ops import data_plane

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.dhisparse")


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """What one step tells the workers.

    ``ring_blocks``: of draft rings that requests claimed in this step; ``commands``: none
    under residency ``resident``; ``recorded``: under ``record_traces`` who is in the step.
    """

    ring_blocks: tuple[int, ...]
    commands: StepCommands | None
    recorded: RecordedStep | None = None


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker tells the controller of a step.

    ``fetched_rows``: for decode and verify, by the index group that fetched most; ``usage``:
    of one index group, in a step that is sampled.
    """

    fetched_rows: int
    usage: Usage | None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Tensor-parallel ranks fetch the same rows; any one's report is all of them."""
        return self


class DHiSparseConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries step commands and statistics of one engine."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counters: RowCounters | None = None
        """Of a worker, once its KV cache stands."""
        self._sizes = geometry(vllm_config)
        self._scheduler_state: SchedulerState | None = None
        self._worker: WorkerState | None = None
        self._ring_caches: list[torch.Tensor] = []
        self._rings: list[DraftRingManager] = []
        self._is_registered = False
        self._controller: ResidencyController | None = None
        self._fetched_rows = 0
        self._working_set_rows = 0
        self._adaptations = DHiSparseStats()
        self._recorder: TraceRecorder | None = None
        folder = self._sizes.config.record_traces
        if (
            folder is not None
            and role is KVConnectorRole.WORKER
            and get_tensor_model_parallel_rank() == 0
        ):
            self._recorder = TraceRecorder(Path(folder), vllm_config.model_config.model)

    @property
    def _block_bytes(self) -> int:
        return self._kv_cache_config.kv_cache_tensors[0].size // self._kv_cache_config.num_blocks

    @property
    def _num_pages(self) -> int:
        """Host pages. One page belongs to one indexer block, so more than blocks are idle."""
        pages = self._kv_transfer_config.kv_connector_extra_config[HOST_PAGES]
        return int(min(pages, self._kv_cache_config.num_blocks - 1))

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
        groups = self._kv_cache_config.kv_cache_groups
        rings = [group for group in groups if isinstance(group.kv_cache_spec, DraftRingSpec)]
        self._ring_caches = [kv_caches[name] for group in rings for name in group.layer_names]
        context = self._vllm_config.compilation_config.static_forward_context
        layers = latent_layers(kv_caches, context)
        index_groups = index_groups_of(layers)
        first = next(iter(layers.values()))
        ops = data_plane(first.kv_cache.device)
        device = first.impl.worker_device(ops, self._sizes)
        rank = get_tensor_model_parallel_rank()
        layer_bytes = [
            index_groups.count(group) * self._sizes.row_bytes
            for group in range(index_groups[-1] + 1)
        ]
        self._counters = counters = first.impl.row_counters(rank == 0, layer_bytes, device.device)
        if self._sizes.config.residency == "resident":
            first.impl.self_check(layers, self._sizes, None)
            for layer, group in zip(layers.values(), index_groups, strict=True):
                layer.impl.path = ResidentLayer(
                    device.attention, counters, group, layer.impl.is_leader
                )
            if self._recorder is not None:
                record_leaders(layers, self._recorder, lambda metadata: metadata)
            return
        worker = WorkerState(
            self._sizes,
            self._kv_cache_config,
            layers,
            self._num_pages,
            ops,
            counters,
            device,
            rank,
        )
        self._worker = worker
        try:
            first.impl.self_check(layers, self._sizes, worker)
        except BaseException:
            self.shutdown()
            raise
        for layer, place in zip(layers.values(), worker.places, strict=True):
            layer.impl.path = HierarchyLayer(worker, place, layer.impl.is_leader)
        if self._recorder is not None:
            record_leaders(layers, self._recorder, lambda _: worker.step_inputs().metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Apply the step's commands. vLLM calls this once a step, before the forward pass.

        On CUDA that is on the stream of the forward pass, after metadata was built.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        assert self._counters is not None
        self._counters.begin_step()
        if self._recorder is not None and connector_metadata.recorded is not None:
            self._recorder.begin_step(connector_metadata.recorded)
        for cache in self._ring_caches:
            cache[list(connector_metadata.ring_blocks)] = 0
        if connector_metadata.commands is not None:
            assert self._worker is not None
            self._worker.apply(connector_metadata.commands)

    def shutdown(self) -> None:
        """Let go of host memory, and write what was recorded of requests that still run."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def build_connector_worker_meta(self) -> WorkerReport:
        """Return what the scheduler's controller needs to know of this step."""
        assert self._counters is not None
        return WorkerReport(self._counters.take_fetched(), self._counters.take_usage())

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
        self._rings = draft_rings(kv_cache_manager)
        if self._sizes.config.residency != "resident":
            refuse_small_pool(self._vllm_config, self._sizes, self._num_pages)
            logger.info(
                "DHISPARSE: residency %s, %.2f GiB of host memory for the history of %d tokens",
                self._sizes.config.residency,
                self._num_pages * self._sizes.page_bytes / 2**30,
                self._num_pages * self._sizes.plan.indexer_block_tokens,
            )
            self._scheduler_state = SchedulerState(
                kv_cache_manager,
                self._num_pages,
                "adaptive" if self._sizes.config.residency == "adaptive" else "fixed",
                self._vllm_config.max_in_flight_tokens,
                self._vllm_config.num_lookahead_tokens,
                shortens_drafts(self._vllm_config),
            )
        if self._sizes.config.residency == "adaptive":
            assert self._scheduler_state is not None
            self._controller = controller_for(
                self._sizes.config, self._vllm_config, self._scheduler_state
            )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Note what the workers fetched."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._fetched_rows = report.fetched_rows
            if report.usage is not None:
                self._working_set_rows = working_set_rows(report.usage)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return no tokens: history comes back through vLLM's own prefix cache."""
        if self._scheduler_state is not None:
            self._scheduler_state.on_new_request(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Note the blocks of an admitted request."""
        if self._scheduler_state is not None:
            self._scheduler_state.on_admitted(request, blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Return this step's message to the workers."""
        ring_blocks = tuple(block for ring in self._rings for block in ring.take_claimed())
        state = self._scheduler_state
        recorded = None
        if self._sizes.config.record_traces is not None:
            assert self._kv_cache_manager is not None
            recorded = recorded_step(scheduler_output, self._kv_cache_manager)
        if state is None:
            return StepMetadata(ring_blocks, None, recorded)
        state.bind_scheduled(scheduler_output)
        if self._controller is not None:
            fetched_rows, self._fetched_rows = self._fetched_rows, 0  # a report counts once
            done = state.adapt(
                self._controller, scheduler_output, fetched_rows, self._working_set_rows
            )
            scheduler_output.num_spec_tokens_to_schedule = done.draft_tokens
            unit_bytes = self._block_bytes * state.ledger.num_groups
            self._adaptations.aggregate(adaptation_stats(done, unit_bytes))
        return StepMetadata(ring_blocks, state.take_commands(), recorded)

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
            stats, self._adaptations = self._adaptations, DHiSparseStats()
            if self._scheduler_state is not None and (
                waits := self._scheduler_state.take_page_waits()
            ):
                stats.add(HOST_POOL_WAITS.key(), waits)
            if wraps := sum(ring.take_wraps() for ring in self._rings):
                stats.add(DRAFT_RING_WRAPS.key(), wraps)
            stats.data["gauges"].update(self._levels(self._kv_cache_manager))
            return stats
        return None if self._counters is None else self._counters.take_stats()

    def _levels(self, manager: "KVCacheManager") -> dict[str, float]:
        state = self._scheduler_state
        levels = None if state is None else state.ledger.levels()
        sizes = residency_bytes(manager, self._kv_cache_config, levels)
        gauges = {RESIDENCY_BYTES.key(use): float(size) for use, size in sizes.items()}
        if state is not None and levels is not None:
            gauges[RESIDENCY_ROWS.key("required")] = levels.required_units * UNIT_ROWS
            gauges[RESIDENCY_ROWS.key("optional")] = levels.optional_units * UNIT_ROWS
            held, free = state.pages.num_held, state.pages.num_free
            gauges[HOST_POOL_PAGES.key("held")] = held
            gauges[HOST_POOL_PAGES.key("free")] = free
            gauges[HOST_POOL_PAGES.key("idle")] = state.pages.num_pages - held - free
            ranks = self._vllm_config.parallel_config.tensor_parallel_size
            pool_bytes = state.pages.num_pages * self._sizes.page_bytes * ranks
            gauges[HOST_POOL_BYTES.key()] = float(pool_bytes)
            gauges[WORKING_SET_ROWS.key()] = float(self._working_set_rows)
        rings = self._rings
        held = sum(ring.num_rings * ring.ring_blocks * ring.block_size for ring in rings)
        gauges[DRAFT_RING_ROWS.key("held")] = held
        gauges[DRAFT_RING_ROWS.key("written")] = sum(ring.num_written_rows() for ring in rings)
        return gauges

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


def latent_layers(names: Iterable[str], context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention layers of this backend in model order, which index groups follow."""
    return {
        name: context[name]
        for name in sorted(names, key=extract_layer_index)
        if isinstance(getattr(context[name], "impl", None), DHiSparseImpl)
    }
