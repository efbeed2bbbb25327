"""The DHISPARSE attention backend: sparse MLA over rows, wherever they live."""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionLayer,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.layers import LayerPath, PlaneAttention
from vllm_dhisparse.integration.metadata import DHiSparseMetadata, DHiSparseMetadataBuilder
from vllm_dhisparse.integration.names import BACKEND, KV_CACHE_DTYPES
from vllm_dhisparse.integration.row_counters import HostRowCounters, RowCounters
from vllm_dhisparse.integration.worker_state import Device, WorkerState
from vllm_dhisparse.runtime.ops import DataPlane
from vllm_dhisparse.runtime.plan import SparseQuery
from vllm_dhisparse.runtime.scratch import Scratch


class LatentPlan(NamedTuple):
    """What the latent layers' spec needs beyond vLLM's.

    ``page_size_padded``: bytes of a page, None = no padding; ``base_units``: required
    units of a running request, None = the whole history is resident.
    """

    page_size_padded: int | None
    base_units: int | None


class DHiSparseBackend(AttentionBackend):
    """Sparse MLA only; other layers of a model (draft layers) choose their own backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    latent: ClassVar["LatentPlan | None"] = None

    @staticmethod
    def get_name() -> str:
        """Return the name on the command line."""
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type["DHiSparseImpl"]:
        """Return the implementation of one layer."""
        return DHiSparseImpl

    @staticmethod
    def get_builder_cls() -> type[DHiSparseMetadataBuilder]:
        """Return the metadata builder of a KV group."""
        return DHiSparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Return whole latent blocks."""
        return [MultipleOf(UNIT_ROWS)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec of latent layers under ``latent``; vLLM's kind when resident."""
        if cls.latent is None:
            return spec
        if cls.latent.base_units is None:
            return replace(spec, page_size_padded=cls.latent.page_size_padded)
        return DHiSparseLatentSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            max_tp_shards=spec.max_tp_shards,
            state_content_bytes=spec.state_content_bytes,
            page_size_padded=cls.latent.page_size_padded,
            base_units_per_request=cls.latent.base_units,
        )

    @classmethod
    def is_mla(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Return True."""
        return True


@cache
def planned_backend(latent: LatentPlan) -> type[DHiSparseBackend]:
    """Return the backend with ``latent`` as its plan.

    vLLM asks the class for the spec, without any configuration at hand.
    """
    return type("DHiSparseBackend", (DHiSparseBackend,), {"latent": latent})


class DHiSparseImpl(MLAAttentionImpl[DHiSparseMetadata], SharedTopkIndicesBuffer):
    """One layer. A leader's indexer writes the selection that its followers reuse."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **_unused: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.is_leader = indexer is not None
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self.path: LayerPath | None = None
        """Set by this engine's connector once the KV cache stands."""

    def worker_device(self, ops: DataPlane, sizes: Geometry) -> Device:
        """Return how a worker of layers like this one works; they share what is in it."""
        rows = 0 if sizes.config.residency == "resident" else sizes.staging_rows
        staging = torch.empty(rows, sizes.row_size, dtype=sizes.dtype)
        scratch = Scratch()
        attention = PlaneAttention(ops, scratch)
        return Device(
            staging.device,
            None,
            staging,
            scratch,
            attention,
            address=lambda metadata: metadata,
            span=lambda kv_cache: None,
        )

    def self_check(
        self, layers: dict[str, Any], sizes: Geometry, worker: WorkerState | None
    ) -> None:
        """Do nothing: the tests have run this product, and ``doctor`` runs it again."""

    @staticmethod
    def row_counters(
        counts_rows: bool, layer_bytes: list[int], device: torch.device
    ) -> RowCounters:
        """Return the counters of a worker, see ``row_counters.RowTotals``."""
        return HostRowCounters(counts_rows, layer_bytes)

    def record_logical_topk_ready(self) -> None:
        """Do nothing: on CPU the selection is complete when the indexer returns."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the step's rows.

        Args:
            kv_c_normed: [num_tokens, kv_lora_rank].
            k_pe: [num_tokens, 1, rope_dim].
            kv_cache: [num_blocks, block_size, kv_lora_rank + rope_dim]; empty when profiling.
            slot_mapping: [num_tokens] int64 - ``block * block_size + offset``, -1 = padding.
            kv_cache_dtype: unused, the cache has the model's dtype.
            k_scale: unused, rows are not quantised.

        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        real = slots >= 0
        if not real.any():
            return  # a data-parallel rank without requests takes part in the others' steps
        rows = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1)[: len(slots)].to(kv_cache.dtype)
        block_size = kv_cache.shape[1]
        kv_cache[slots[real] // block_size, slots[real] % block_size] = rows[real]
        self._placed().publish(rows, slots)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: DHiSparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the selected rows.

        Args:
            q: [num_tokens, num_heads, kv_lora_rank + rope_dim], or its two parts.
            kv_c_and_k_pe_cache: [num_blocks, block_size, kv_lora_rank + rope_dim].
            attn_metadata: the batch.
            layer: unused.

        Returns:
            [num_tokens, num_heads, kv_lora_rank] in the query's dtype, and no lse.

        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert self.topk_indices_buffer is not None
        selected = self.topk_indices_buffer[: query.shape[0]]
        asked = SparseQuery(query, kv_c_and_k_pe_cache, selected, self.scale, self.kv_lora_rank)
        return self._placed().attend(asked, attn_metadata), None

    def _placed(self) -> LayerPath:
        if self.path is None:
            raise RuntimeError("the KV connector of this package was not given the KV cache")
        return self.path
