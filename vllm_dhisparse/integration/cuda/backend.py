"""DHISPARSE on CUDA: the backend of vLLM's DSA models, and its layers."""

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionLayer

from vllm_dhisparse.integration.attention import DHiSparseBackend, DHiSparseImpl, LatentPlan
from vllm_dhisparse.integration.cuda.address import address_of, carry_address
from vllm_dhisparse.integration.cuda.metadata import CudaMetadata, CudaMetadataBuilder
from vllm_dhisparse.integration.cuda.row_counters import DeviceRowCounters
from vllm_dhisparse.integration.cuda.self_check import (
    check_attention,
    check_host_pool,
    check_reach,
    check_views,
)
from vllm_dhisparse.integration.cuda.workspace import Workspace, shared_workspace
from vllm_dhisparse.integration.geometry import Geometry, geometry
from vllm_dhisparse.integration.layers import LayerPath
from vllm_dhisparse.integration.names import FP8_ROWS, KV_CACHE_DTYPES
from vllm_dhisparse.integration.row_counters import RowCounters
from vllm_dhisparse.integration.worker_state import Device, WorkerState
from vllm_dhisparse.runtime.cuda_pinner import CudaPinner
from vllm_dhisparse.runtime.ops import DataPlane
from vllm_dhisparse.runtime.plan import SparseQuery

_ROW_VALUES = 576  # of GLM-5.x and DeepSeek-V3.2; what FlashMLA reads


class CudaBackend(DHiSparseBackend):
    """Sparse MLA on Hopper and Blackwell data centre GPUs, bfloat16 models.

    ``latent`` is the plan of the model that was built last in this process: vLLM asks the
    class for a spec without any configuration at hand, right after it has built the model.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*KV_CACHE_DTYPES, FP8_ROWS]

    @staticmethod
    def get_impl_cls() -> type["CudaImpl"]:
        """Return the implementation of one layer."""
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaMetadataBuilder]:
        """Return the metadata builder of a latent group."""
        return CudaMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the values of a row, before quantisation."""
        return [_ROW_VALUES]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether the chip is one that vLLM's DSA models run on."""
        return capability.major in (9, 10)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether adaptive verification may shorten queries on the device: only it is asked."""
        return True


class CudaImpl(DHiSparseImpl):
    """One layer. The model has written the step's rows before it asks for attention."""

    def __init__(self, *args: Any, indexer: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, indexer=indexer, **kwargs)
        vllm_config = get_current_vllm_config()
        sizes = geometry(vllm_config)
        resident = sizes.config.residency == "resident"
        CudaBackend.latent = (
            None if resident else LatentPlan(sizes.plan.page_size_padded, sizes.base_units)
        )
        assert self.topk_indices_buffer is not None
        device = self.topk_indices_buffer.device
        self._workspace: Workspace = shared_workspace(vllm_config, sizes, self.num_heads, device)
        if indexer is not None:
            carry_address(indexer.k_cache)

    def worker_device(self, ops: DataPlane, sizes: Geometry) -> Device:
        """Return how a worker of layers like this one works; they share what is in it.

        Raises:
            RuntimeError: CuPy is missing, or finds no device.

        """
        workspace = self._workspace
        workspace.release_reserve()
        return Device(
            workspace.staging.device,
            None if sizes.config.residency == "resident" else CudaPinner(),
            workspace.staging,
            workspace.scratch,
            workspace.attention,
            address_of,
            workspace.span,
        )

    def self_check(
        self, layers: dict[str, Any], sizes: Geometry, worker: WorkerState | None
    ) -> None:
        """Prove the views, the pinned memory and attention before the first step.

        Raises:
            RuntimeError: one of them is not as it must be; the message says which.

        """
        workspace = self._workspace
        if worker is not None:
            check_views(layers, sizes)
            check_host_pool(worker)
            check_reach(worker, workspace.query)
            assert isinstance(worker.counters, DeviceRowCounters)
            worker.counters.attach(
                worker.ops, worker.tables, [p.index_group for p in worker.places]
            )
        staged = workspace.staging.dtype if worker is not None else sizes.dtype
        check_attention(workspace.attention, workspace.query, staged)

    @staticmethod
    def row_counters(
        counts_rows: bool, layer_bytes: list[int], device: torch.device
    ) -> RowCounters:
        """Return the counters of a worker, see ``row_counters.RowTotals``."""
        return DeviceRowCounters(counts_rows, layer_bytes, device)

    def prepare_for_batch(self, attn_metadata: CudaMetadata | None) -> None:
        """Do nothing: vLLM calls this twice a layer, once inside and once outside a graph."""

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: on CUDA the model's own kernel writes the rows."""
        raise NotImplementedError("the model does not write its own latent rows")

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CudaMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the step's rows through to their home, then attend to the selected ones.

        Args:
            q: [num_tokens, num_heads, kv_lora_rank] and [num_tokens, num_heads, rope_dim].
            kv_c_and_k_pe_cache: [num_blocks, block_size, row_size].
            attn_metadata: the batch.
            layer: unused.

        Returns:
            [num_tokens, num_heads, kv_lora_rank] bfloat16, and no lse.

        """
        assert isinstance(q, tuple), "queries are not quantised"
        latent, rope = q
        num_tokens = attn_metadata.num_actual_tokens
        query = self._workspace.query[:num_tokens]
        query[:, : self.num_heads, : self.kv_lora_rank] = latent
        query[:, : self.num_heads, self.kv_lora_rank :] = rope
        assert self.topk_indices_buffer is not None
        selected = self.topk_indices_buffer[:num_tokens]
        path: LayerPath = self.path or _NowhereLayer(self._workspace)
        slots = attn_metadata.slot_mapping
        path.publish(written_rows(kv_c_and_k_pe_cache, slots), slots)
        asked = SparseQuery(query, kv_c_and_k_pe_cache, selected, self.scale, self.kv_lora_rank)
        out = path.attend(asked, attn_metadata)
        return out[:, : self.num_heads], None


def written_rows(kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows at ``slots``: [n, row_size]; padding (negative) gives any row."""
    place = slots.clamp(min=0)
    block_size = kv_cache.shape[1]
    return kv_cache[place // block_size, place % block_size]


class _NowhereLayer:
    """While vLLM measures graphs it has a small KV cache and no connector: rows have no home.

    A real batch never comes here: without a connector vLLM cannot allocate a latent block.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def publish(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Nothing: there is no home."""

    def attend(self, asked: SparseQuery, metadata: Any) -> torch.Tensor:
        """Attend to no row, with the memory that a step takes."""
        staging = self._workspace.staging
        rows = staging[None] if len(staging) else asked.rows
        nothing = torch.full_like(asked.remap, -1)
        return self._workspace.attention.attend(asked._replace(rows=rows, remap=nothing), metadata)
