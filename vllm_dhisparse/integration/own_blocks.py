"""Managers of KV groups that vLLM's prefix cache does not know."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class OwnBlocksManager(SingleTypeKVCacheManager):
    """Block tables whose blocks belong to one request: null for a prefix hit, real behind it."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        # The coordinator skips managers without caching each time it hashes blocks.
        super().__init__(kv_cache_spec, **{**kwargs, "enable_caching": False})
        # leading null blocks by request; without an entry there are none
        self._num_null: dict[str, int] = {}

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All computed tokens: a prefix hit puts null blocks into the table."""
        return num_computed_tokens

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the table with one null block for each block of the prefix hit."""
        assert not new_computed_blocks
        assert not num_external_computed_tokens
        assert num_local_computed_tokens % self.block_size == 0, "a hit ends inside a block"
        super().add_local_computed_blocks(request_id, (), num_local_computed_tokens, 0)
        self._num_null[request_id] = len(self.req_to_blocks[request_id])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """End the request, however it ends, and return its real blocks."""
        first = self._num_null.pop(request_id, 0)
        blocks = super().pop_blocks_for_free(request_id)
        # vLLM 0.33 leaves the leading null blocks out itself.
        return blocks[first:] if blocks and blocks[0].is_null else blocks

    @classmethod
    def find_longest_cache_hit(cls, **kwargs: Any) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Never called: the spec is not prefix-cacheable, so the coordinator skips the group."""
        raise NotImplementedError("indexer groups alone decide prefix hits")
