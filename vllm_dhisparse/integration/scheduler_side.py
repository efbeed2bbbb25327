"""The connector's part in the engine core: decides for a step, and reports what is held."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_dhisparse.core.adaptation import AdaptiveResidency
from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.working_set import working_set_rows
from vllm_dhisparse.integration.adaptation import add_adaptation, controller_for
from vllm_dhisparse.integration.draft_price import DraftPrice
from vllm_dhisparse.integration.draft_ring import draft_rings
from vllm_dhisparse.integration.geometry import geometry, verifies_adaptively
from vllm_dhisparse.integration.host_budget import refuse_small_pool, usable_pages
from vllm_dhisparse.integration.messages import StepMetadata, WorkerReport
from vllm_dhisparse.integration.plan_check import check_groups
from vllm_dhisparse.integration.residency import residency_bytes
from vllm_dhisparse.integration.scheduler_state import SchedulerState
from vllm_dhisparse.integration.stats import DHiSparseStats
from vllm_dhisparse.integration.trace_recorder import recorded_step
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

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.dhisparse")


class SchedulerSide:
    """Scheduler's state of the hierarchy, its controller, and what they did.

    Args:
        vllm_config: of the engine.
        kv_cache_config: the scheduler's plan of the cache.
        manager: vLLM's.

    Attributes:
        state: None under residency ``resident``.
        rings: managers of draft rings.

    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        manager: "KVCacheManager",
    ) -> None:
        self._kv_cache_config = kv_cache_config
        self._manager = manager
        self._sizes = sizes = geometry(vllm_config)
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self.rings = draft_rings(manager)
        self.state: SchedulerState | None = None
        self._residency: AdaptiveResidency | None = None
        self._draft_price: DraftPrice | None = None
        self._fetched_rows = 0
        self._working_set_rows = 0
        self._adaptations = DHiSparseStats()
        if sizes.config.residency == "resident":
            return
        check_groups(kv_cache_config, sizes.plan)
        num_pages = usable_pages(vllm_config, kv_cache_config)
        refuse_small_pool(vllm_config, sizes, num_pages)
        logger.info(
            "DHISPARSE: residency %s, %.2f GiB of host memory for the history of %d tokens",
            sizes.config.residency,
            num_pages * sizes.page_bytes / 2**30,
            num_pages * sizes.plan.indexer_block_tokens,
        )
        self.state = SchedulerState(
            manager,
            num_pages,
            "adaptive" if sizes.config.residency == "adaptive" else "fixed",
            vllm_config.max_in_flight_tokens,
            vllm_config.num_lookahead_tokens,
            vllm_config.num_speculative_tokens,
        )
        if verifies_adaptively(vllm_config):
            self._draft_price = DraftPrice(sizes.row_bytes * sizes.num_layers)
        if sizes.config.residency == "adaptive":
            controller = controller_for(sizes.config, vllm_config, self.state)
            self._residency = self.state.residency(controller)

    def note_report(self, report: WorkerReport) -> None:
        """Note what the workers fetched."""
        self._fetched_rows = report.fetched_rows
        if report.usage is not None:
            self._working_set_rows = working_set_rows(report.usage)
        if self._draft_price is not None:
            self._draft_price.note_report(report)

    def step_metadata(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Return the step's message to the workers; once a step, also for empty ones."""
        ring_blocks = tuple(block for ring in self.rings for block in ring.take_claimed())
        recorded = None
        if self._sizes.config.record_traces is not None:
            recorded = recorded_step(scheduler_output, self._manager)
        if self.state is None:
            return StepMetadata(ring_blocks, None, recorded)
        self.state.bind_scheduled(scheduler_output)
        if self._residency is not None:
            fetched_rows, self._fetched_rows = self._fetched_rows, 0  # a report counts once
            done = self._residency.adapt(
                self.state.waiting_blocks,
                self.state.growth_blocks(scheduler_output.total_num_scheduled_tokens),
                fetched_rows,
                self._working_set_rows,
            )
            unit_bytes = self._block_bytes * self.state.ledger.num_groups
            add_adaptation(self._adaptations, done, self.state.draft_tokens, unit_bytes)
        price = self._draft_price
        fetch_ms = 0.0 if price is None else price.next_ms(scheduler_output)
        return StepMetadata(ring_blocks, self.state.take_commands(), recorded, fetch_ms)

    def take_stats(self) -> DHiSparseStats:
        """Return what happened since the last call, and the levels of now."""
        stats, self._adaptations = self._adaptations, DHiSparseStats()
        if self.state is not None and (waits := self.state.take_page_waits()):
            stats.add(HOST_POOL_WAITS.key(), waits)
        if wraps := sum(ring.take_wraps() for ring in self.rings):
            stats.add(DRAFT_RING_WRAPS.key(), wraps)
        stats.data["gauges"].update(self._levels())
        return stats

    @property
    def _block_bytes(self) -> int:
        return self._kv_cache_config.kv_cache_tensors[0].size // self._kv_cache_config.num_blocks

    def _levels(self) -> dict[str, float]:
        levels = None if self.state is None else self.state.ledger.levels()
        sizes = residency_bytes(self._manager, self._kv_cache_config, levels)
        gauges = {RESIDENCY_BYTES.key(use): float(size) for use, size in sizes.items()}
        if self.state is not None and levels is not None:
            gauges[RESIDENCY_ROWS.key("required")] = levels.required_units * UNIT_ROWS
            gauges[RESIDENCY_ROWS.key("optional")] = levels.optional_units * UNIT_ROWS
            pages = self.state.pages
            held, free = pages.num_held, pages.num_free
            gauges[HOST_POOL_PAGES.key("held")] = held
            gauges[HOST_POOL_PAGES.key("free")] = free
            gauges[HOST_POOL_PAGES.key("idle")] = pages.num_pages - held - free
            pool_bytes = pages.num_pages * self._sizes.page_bytes * self._ranks
            gauges[HOST_POOL_BYTES.key()] = float(pool_bytes)
            gauges[WORKING_SET_ROWS.key()] = float(self._working_set_rows)
        held = sum(ring.num_rings * ring.ring_blocks * ring.block_size for ring in self.rings)
        gauges[DRAFT_RING_ROWS.key("held")] = held
        gauges[DRAFT_RING_ROWS.key("written")] = sum(ring.num_written_rows() for ring in self.rings)
        return gauges
