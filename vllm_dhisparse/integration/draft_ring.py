"""Draft KV of windowed layers in a ring: a few blocks per request, whatever its length.

A query of a drafter sees ``sliding_window - 1`` earlier tokens and the queries of its own
draft. At the end of the longest context vLLM clamps the positions of queries, which moves their
window back by up to all queries but one. So many rows in a row of positions are ever needed at
once. Logical block ``j`` of a request lies in physical block ``j % ring_blocks``. Attention
kernels see an ordinary block table, in which blocks come again; the window hides what was
overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_dhisparse.integration.own_blocks import OwnBlocksManager


@dataclass(frozen=True, kw_only=True)
class DraftRingSpec(SlidingWindowSpec):
    """A windowed draft layer whose rows lie in a ring."""

    query_rows: int
    """Rows that a draft writes beyond the last accepted token of a request."""

    @property
    def earlier_rows(self) -> int:
        """Accepted rows that a draft may see, at the end of the longest context too."""
        return self.sliding_window - 1 + self.query_rows - 1

    @property
    def ring_blocks(self) -> int:
        """Blocks of one request: the rows before the draft, and the draft."""
        return cdiv(self.earlier_rows + self.query_rows, self.block_size)

    @property
    def ring_rows(self) -> int:
        """Rows of one request."""
        return self.ring_blocks * self.block_size

    @property
    def prefix_cacheable(self) -> bool:
        """Never: rows before a prefix hit are left out of attention."""
        return False

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Return the ring, which a request holds from start to end."""
        return self.ring_blocks

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one request of any length."""
        return self.ring_blocks * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all layers have this ring."""
        return all(spec == self for spec in kv_cache_specs.values())


class DraftRingManager(OwnBlocksManager):
    """Block tables of one ring group.

    After a prefix hit the drafter's rows of the hit do not exist. The table then starts with
    null blocks, by which the workers know, and the ring starts behind them.
    """

    def __init__(self, kv_cache_spec: DraftRingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.ring_blocks = kv_cache_spec.ring_blocks
        self._rings: dict[str, list[KVCacheBlock]] = {}
        self._claimed: list[int] = []
        self._num_wraps = 0

    @property
    def num_rings(self) -> int:
        """Requests that hold a ring."""
        return len(self._rings)

    def num_written_rows(self) -> int:
        """Rows of all rings that hold a token, or the room of a draft."""
        blocks = (
            min(len(self.req_to_blocks[request]) - self._num_null.get(request, 0), len(ring))
            for request, ring in self._rings.items()
        )
        return sum(blocks) * self.block_size

    def take_wraps(self) -> int:
        """Return how often rings came back to their first block since the last call."""
        wraps, self._num_wraps = self._num_wraps, 0
        return wraps

    def take_claimed(self) -> list[int]:
        """Return the blocks of new rings. The workers zero them before the step.

        A masked row still meets attention's weights: 0 times NaN, which blocks hold that
        another layer wrote, is NaN.
        """
        claimed, self._claimed = self._claimed, []
        return claimed

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the ring of a request that has none, else nothing."""
        return 0 if request_id in self._rings else self.ring_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the table with blocks of the ring, which a new request claims first."""
        ring = self._rings.get(request_id)
        if ring is None:
            ring = self._rings[request_id] = self.block_pool.get_new_blocks(self.ring_blocks)
            self._claimed += [block.block_id for block in ring]
        table = self.req_to_blocks[request_id]
        null = self._num_null.get(request_id, 0)
        first, end = len(table) - null, cdiv(num_tokens, self.block_size) - null
        if end <= first:
            return []
        new_blocks = [ring[i % self.ring_blocks] for i in range(first, end)]
        table.extend(new_blocks)
        self._num_wraps += (end - 1) // self.ring_blocks - max(first - 1, 0) // self.ring_blocks
        return new_blocks

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Nothing: rows behind the window are overwritten."""

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """End the request, however it ends, and return its ring, each block once."""
        super().pop_blocks_for_free(request_id)
        return self._rings.pop(request_id, [])


def draft_rings(kv_cache_manager: KVCacheManager) -> list[DraftRingManager]:
    """Return the managers of all ring groups."""
    managers = kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if isinstance(manager, DraftRingManager)]


def register_ring_spec() -> None:
    """Make vLLM know the ring and its manager; repeated calls are fine."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        DraftRingSpec, DraftRingManager, uniform_type_base_spec=DraftRingSpec
    )
