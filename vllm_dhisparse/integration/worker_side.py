"""The connector's part in a worker: gives layers the way of their rows, and applies steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dhisparse.integration.attention import DHiSparseImpl
from vllm_dhisparse.integration.draft_price import Verified
from vllm_dhisparse.integration.draft_ring import DraftRingSpec
from vllm_dhisparse.integration.geometry import geometry, verifies_adaptively
from vllm_dhisparse.integration.host_budget import usable_pages
from vllm_dhisparse.integration.layers import HierarchyLayer, ResidentLayer
from vllm_dhisparse.integration.link_speed import link_bytes_per_ms
from vllm_dhisparse.integration.messages import StepMetadata, WorkerReport
from vllm_dhisparse.integration.trace_recorder import TraceRecorder, record_leaders
from vllm_dhisparse.integration.worker_state import WorkerState, index_groups_of
from vllm_dhisparse.runtime.ops import data_plane

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerSide:
    """Worker's state of the hierarchy, its counters and what it records.

    Args:
        vllm_config: of the engine.
        kv_cache_config: this worker's plan of the cache.
        kv_caches: vLLM's tensors by layer name.

    Attributes:
        state: None under residency ``resident``.
        counters: of rows and bytes.
        fetch_ms_per_draft: that the scheduler last sent, for adaptive verification.
        verified: of this step, set by adaptive verification.

    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        sizes = geometry(vllm_config)
        self._ring_caches = [
            kv_caches[name]
            for group in kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, DraftRingSpec)
            for name in group.layer_names
        ]
        layers = latent_layers(kv_caches, vllm_config.compilation_config.static_forward_context)
        index_groups = index_groups_of(layers)
        first = next(iter(layers.values()))
        ops = data_plane(first.kv_cache.device)
        device = first.impl.worker_device(ops, sizes)
        rank = get_tensor_model_parallel_rank()
        layer_bytes = [
            index_groups.count(group) * sizes.row_bytes for group in range(index_groups[-1] + 1)
        ]
        self.counters = first.impl.row_counters(rank == 0, layer_bytes, device.device)
        self.state: WorkerState | None = None
        self.fetch_ms_per_draft = 0.0
        self.verified: Verified | None = None
        self._link_bytes_per_ms = 0.0
        self._recorder: TraceRecorder | None = None
        if sizes.config.record_traces is not None and rank == 0:
            self._recorder = TraceRecorder(
                Path(sizes.config.record_traces), vllm_config.model_config.model
            )
        if sizes.config.residency == "resident":
            first.impl.self_check(layers, sizes, None)
            for layer, group in zip(layers.values(), index_groups, strict=True):
                layer.impl.path = ResidentLayer(
                    device.attention, self.counters, group, layer.impl.is_leader
                )
            if self._recorder is not None:
                record_leaders(layers, self._recorder, lambda metadata: metadata)
            return
        num_pages = usable_pages(vllm_config, kv_cache_config)
        self.state = state = WorkerState(
            sizes, kv_cache_config, layers, num_pages, ops, self.counters, device, rank
        )
        try:
            first.impl.self_check(layers, sizes, state)
        except BaseException:
            self.close()
            raise
        if verifies_adaptively(vllm_config):
            self._link_bytes_per_ms = link_bytes_per_ms(state)
        for layer, place in zip(layers.values(), state.places, strict=True):
            layer.impl.path = HierarchyLayer(state, place, layer.impl.is_leader)
        if self._recorder is not None:
            record_leaders(layers, self._recorder, lambda _: state.step_inputs().metadata)

    def begin_step(self, step: StepMetadata) -> None:
        """Apply what the scheduler says, in stream order before the forward pass."""
        self.counters.begin_step()
        self.fetch_ms_per_draft = step.fetch_ms_per_draft
        if self._recorder is not None and step.recorded is not None:
            self._recorder.begin_step(step.recorded)
        for cache in self._ring_caches:
            cache[list(step.ring_blocks)] = 0
        if step.commands is not None:
            assert self.state is not None
            self.state.apply(step.commands)

    def take_report(self) -> WorkerReport:
        """Return what the scheduler's controller needs to know of this step."""
        verified, self.verified = self.verified, None
        return WorkerReport(
            self.counters.take_fetched(),
            self.counters.take_usage(),
            self._link_bytes_per_ms,
            verified,
        )

    def close(self) -> None:
        """Let go of host memory, and write what was recorded of requests that still run."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self.state is not None:
            self.state.close()
            self.state = None


def latent_layers(names: Iterable[str], context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention layers of this backend in model order, which index groups follow."""
    return {
        name: context[name]
        for name in sorted(names, key=extract_layer_index)
        if isinstance(getattr(context[name], "impl", None), DHiSparseImpl)
    }
