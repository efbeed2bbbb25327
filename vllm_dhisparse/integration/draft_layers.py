"""Draft layers: the KV spec that fits the engine's pages, and attention after a prefix hit."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec

from vllm_dhisparse.core.page_plan import PagePlan
from vllm_dhisparse.integration.draft_ring import DraftRingSpec


def draft_spec(spec: AttentionSpec, plan: PagePlan, ring_query_rows: int | None) -> AttentionSpec:
    """Return the spec of a draft layer under a page plan.

    Args:
        spec: vLLM's own.
        plan: with a drafter.
        ring_query_rows: rows that a draft writes beyond the last accepted token, where
            windowed layers get a ring; None = vLLM's own spec, which keeps more rows.

    """
    assert plan.drafter_block_tokens is not None
    spec = replace(spec, block_size=plan.drafter_block_tokens, page_size_padded=None)
    padded = plan.page_bytes if spec.page_size_bytes != plan.page_bytes else None
    spec = replace(spec, page_size_padded=padded)
    if ring_query_rows is None or not isinstance(spec, SlidingWindowSpec):
        return spec
    return DraftRingSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
        max_tp_shards=spec.max_tp_shards,
        page_size_padded=padded,
        sliding_window=spec.sliding_window,
        query_rows=ring_query_rows,
    )


def without_null_blocks(
    block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let sequences start behind the leading null blocks of their tables.

    A drafter has no rows of a prefix hit, and they must not take part in its attention, not
    even as zeros. Keys carry their absolute positions and windows count from the query, so
    attention over the shorter sequence is attention without the missing rows.

    Args:
        block_table: [num_reqs, width] int32 - 0 = null.
        seq_lens: [num_reqs] int32.
        block_size: tokens per block.

    Returns:
        Table and lengths; the arguments themselves where no table starts with a null block.

    """
    null = (block_table != 0).int().argmax(dim=1).int()
    null = torch.minimum(null, seq_lens // block_size)
    if not null.any():
        return block_table, seq_lens
    width = block_table.shape[1]
    columns = torch.arange(width, device=block_table.device) + null[:, None]
    shifted = block_table.gather(1, columns.clamp(max=width - 1))
    return shifted, seq_lens - null * block_size


@cache
def draft_backend(
    backend: type[AttentionBackend], plan: PagePlan, ring_query_rows: int | None
) -> type[AttentionBackend]:
    """Return ``backend`` for draft layers; it keeps its name.

    vLLM asks the class for the spec, without any configuration at hand.
    """
    builder: Any = backend.get_builder_cls()

    class DraftMetadataBuilder(builder):
        """Leaves missing rows out of attention."""

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            """Build from tables that start with a real block."""
            common = common_attn_metadata
            if isinstance(self.kv_cache_spec, DraftRingSpec):
                table, lengths = without_null_blocks(
                    common.block_table_tensor, common.seq_lens, self.kv_cache_spec.block_size
                )
                common = common.replace(block_table_tensor=table, seq_lens=lengths)
            return super().build(common_prefix_len, common, fast_build)

    class DraftBackend(backend):
        """Attention of draft layers."""

        @staticmethod
        def get_builder_cls() -> type[DraftMetadataBuilder]:
            """Return the builder for rings."""
            return DraftMetadataBuilder

        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            """Return the spec under the page plan."""
            return draft_spec(spec, plan, ring_query_rows)

    return DraftBackend
