"""KV cache specs of the latent layers, as vLLM's block pool sees them."""

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec, SparseCacheRole


@dataclass(frozen=True, kw_only=True)
class DHiSparseLatentSpec(AttentionSpec):
    """Latent rows whose history lives in host memory.

    A sibling of vLLM's MLA spec, not a subclass: vLLM would put latent and indexer
    layers into one group and build the manager of its first layer. Without prefix
    caching of its own, the indexer groups alone decide hits.
    """

    base_units_per_request: int
    """Required units of a running request at most: blocks in each latent group."""
    head_size_v: int = 0

    @property
    def prefix_cacheable(self) -> bool:
        """Never: history comes back from host memory."""
        return False

    def max_tail_blocks(
        self, max_in_flight_tokens: int, num_lookahead_tokens: int, max_model_len: int
    ) -> int:
        """Return the most blocks that one request's tail can have at a time.

        A block leaves the tail once its tokens are processed; the tail may start inside
        a block.
        """
        tokens = min(max_in_flight_tokens + num_lookahead_tokens, max_model_len)
        return min(cdiv(tokens, self.block_size) + 1, cdiv(max_model_len, self.block_size))

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one request of the maximum length: its tail and its share.

        Never more than a block for each of its rows, which vLLM's own spec asks for.
        """
        tail_blocks = self.max_tail_blocks(
            vllm_config.max_in_flight_tokens,
            vllm_config.num_lookahead_tokens,
            vllm_config.model_config.max_model_len,
        )
        all_blocks = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        return min(tail_blocks + self.base_units_per_request, all_blocks) * self.page_size_bytes


def is_indexer_spec(spec: KVCacheSpec) -> bool:
    """Whether the layers of a group hold indexer keys."""
    return isinstance(spec, MLAAttentionSpec) and spec.cache_role is SparseCacheRole.INDEXER
