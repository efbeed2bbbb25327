"""The lightning indexer in torch, and the cache layer of its keys."""

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.integration.metadata import DHiSparseMetadata, DHiSparseMetadataBuilder

# Scores held at once, over queries, heads and keys. Bounds the scratch of long prefills.
_ROUND_SCORES = 8_000_000


class CpuIndexerBackend(AttentionBackend):
    """Metadata of the key cache; it has no attention of its own."""

    @staticmethod
    def get_name() -> str:
        """Return the name in log lines."""
        return "DHISPARSE_INDEXER"

    @staticmethod
    def get_impl_cls() -> type:
        """Refuse: the indexer reads its cache itself."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[DHiSparseMetadataBuilder]:
        """Return the builder shared with the latent layers."""
        return DHiSparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Return whole latent blocks, so that both layers can share block ids."""
        return [MultipleOf(UNIT_ROWS)]


class CpuIndexerCache(DeepseekV32IndexerCache):
    """Keys in the model's dtype; CUDA's fp8 bytes with scales have no CPU kernel."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return one vector of ``index_head_dim`` values per token."""
        return MLAAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=vllm_config.model_config.hf_text_config.index_head_dim,
            dtype=vllm_config.model_config.dtype,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the metadata-only backend."""
        return CpuIndexerBackend


class CpuIndexer(Indexer):
    """`Indexer` in plain torch: same projections, unquantised scores, ties by position."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: torch.nn.Module,
    ) -> torch.Tensor:
        """Store the step's keys and write the selected positions to the shared buffer.

        Args:
            hidden_states: [num_tokens, hidden_size].
            qr: [num_tokens, q_lora_rank] - compressed queries.
            positions: [num_tokens] int64.
            rotary_emb: rope of the first ``rope_dim`` values of each head.

        Returns:
            The buffer [max_num_tokens, index_topk] int32; -1 fills unused places.

        """
        queries, keys, weights = self._project(hidden_states, qr, positions, rotary_emb)
        all_metadata = get_forward_context().attn_metadata
        if not isinstance(all_metadata, dict):  # a profiling run has no cache
            return self.topk_indices_buffer
        metadata: DHiSparseMetadata = all_metadata[self.k_cache.prefix]
        num_tokens = metadata.num_actual_tokens
        cache = self.k_cache.kv_cache  # [num_blocks, block_size, head_dim]
        real = metadata.slot_mapping >= 0
        slots = metadata.slot_mapping[real]
        cache[slots // metadata.block_size, slots % metadata.block_size] = keys[:num_tokens][real]

        selected = self.topk_indices_buffer[: hidden_states.shape[0]]
        selected.fill_(-1)
        starts = metadata.query_start_loc.tolist()
        for request, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[request, : -(-length // metadata.block_size)].long()
            context = cache[blocks].flatten(0, 1)[:length].float()
            tokens = slice(starts[request], starts[request + 1])
            selected[tokens] = select_positions(
                queries[tokens].float(),
                context,
                weights[tokens].float(),
                metadata.token_position[tokens],
                self.topk_tokens,
            )
        return self.topk_indices_buffer

    def _project(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: torch.nn.Module,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, dim], keys [T, dim] and head weights [T, heads]."""
        queries = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        keys_and_weights = self.wk_weights_proj(hidden_states)[0]
        keys = self.k_norm(keys_and_weights[:, : self.head_dim])
        weights = keys_and_weights[:, self.head_dim :] * self.softmax_scale * self.n_head_scale
        query_rope, key_rope = rotary_emb(
            positions,
            queries[..., : self.rope_dim].contiguous(),
            keys[:, None, : self.rope_dim].contiguous(),
        )
        queries = torch.cat([query_rope, queries[..., self.rope_dim :]], dim=-1)
        keys = torch.cat([key_rope.squeeze(1), keys[:, self.rope_dim :]], dim=-1)
        return queries, keys, weights


def select_positions(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Return the ``top_k`` best visible positions of each query, best first.

    The score is ``sum over heads of weight * relu(query . key)`` (DeepSeek-V3.2,
    lightning indexer). Equal scores are ordered by position, lower first: relu makes
    exact ties common, and torch.topk would break them by row length and batch.

    Args:
        queries: [num_queries, num_heads, dim] float32.
        keys: [context, dim] float32.
        weights: [num_queries, num_heads] float32, scales included.
        positions: [num_queries] int64 - a query sees keys up to its own position.
        top_k: places per query.

    Returns:
        [num_queries, top_k] int32, filled up with -1.

    """
    num_queries, num_heads, _ = queries.shape
    context = keys.shape[0]
    places = torch.arange(context)
    selected = torch.full((num_queries, top_k), -1, dtype=torch.int32)
    kept = min(top_k, context)
    round_queries = max(1, _ROUND_SCORES // (num_heads * context))
    for start in range(0, num_queries, round_queries):
        part = slice(start, start + round_queries)
        per_head = torch.matmul(queries[part], keys.T).relu_()  # [queries, heads, context]
        scores = torch.einsum("qhk,qh->qk", per_head, weights[part])
        order = _descending_order(scores, places)
        order.masked_fill_(places[None, :] > positions[part, None], _HIDDEN)
        best = order.topk(kept, dim=-1).values
        found = (_LAST_PLACE - (best & _LAST_PLACE)).to(torch.int32)
        selected[part, :kept] = found.masked_fill_(best == _HIDDEN, -1)
    return selected


_LAST_PLACE = (1 << 32) - 1
_HIDDEN = torch.iinfo(torch.int64).min


def _descending_order(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return int64 keys, all different, that sort by score and then by lower position.

    Upper half: the float's bits as an integer that sorts like the float. Lower half:
    the position, counted down.
    """
    bits = (scores + 0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    rank = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    return (rank << 32) | (_LAST_PLACE - places)
