"""vLLM's manager of a latent KV group: tails in the block table, the rest in the ledger."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_dhisparse.core.spans import Span
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.own_blocks import OwnBlocksManager

if TYPE_CHECKING:
    from vllm_dhisparse.integration.scheduler_state import SchedulerState


class DHiSparseManager(OwnBlocksManager):
    """Block tables of one latent group: full length, null at the head, real at the tail.

    vLLM calls the managers of all groups in order with the same arguments. The first
    latent one (the lead) decides and accounts for all latent groups; the others only
    copy the units' blocks into their tables. It also takes full blocks out of all tables.
    """

    def __init__(self, kv_cache_spec: DHiSparseLatentSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._state: SchedulerState | None = None
        self._group = 0
        # blocks of a prefix hit by request, until their rows are known to be written
        self._hit_blocks: dict[str, int] = {}

    def bind(self, state: "SchedulerState", group: int) -> None:
        """Use ``state``; ``group`` is the place of this group among the latent ones."""
        self._state = state
        self._group = group

    def new_step_starts(self) -> None:
        """Begin the step; the lead does it for all."""
        if not self._group:
            self._bound_state().begin_step()

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
        """Return what the request requires of the pool in all latent groups.

        The lead answers for all: tail and, on admission, share of the hit. It asks for more
        blocks than there are when the host pages do not suffice, so that vLLM makes
        the request wait or preempts.

        Raises:
            RuntimeError: no connector of this package was bound to the KV cache manager.

        """
        if self._group:
            return 0
        state = self._bound_state()
        units = -(-num_tokens // self.block_size)
        is_running = state.ledger.is_running(request_id)
        if is_running:
            units -= len(self.req_to_blocks[request_id])
            if units <= 0:
                return 0  # a page has whole units, so no page is missing either
        page_blocks = -(-num_tokens // state.page_tokens)
        if state.lacks_pages(request_id, page_blocks):
            return self.block_pool.num_gpu_blocks + 1
        if not is_running:
            hit_units = total_computed_tokens // self.block_size
            shared_units = state.shared_hit_units(request_id)
            units -= hit_units - state.ledger.missing_units(hit_units, shared_units)
            if apply_admission_cap:
                # Full tails become the share; beyond it they leave the request.
                units = min(units, state.max_tail_blocks + state.ledger.base_units)
            state.consider(request_id, units * state.ledger.num_groups, page_blocks)
        return units * state.ledger.num_groups if units > 0 else 0

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the table with one null block for each block of the prefix hit."""
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        if not self._group:
            self._hit_blocks[request_id] = len(self.req_to_blocks[request_id])

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the table with tail blocks; the lead claims the share of a hit first."""
        table = self.req_to_blocks[request_id]
        first = len(table)
        end = -(-num_tokens // self.block_size)
        if end <= first:  # in most steps; never on admission, which computes a token at least
            return []
        state = self._bound_state()
        ledger = state.ledger
        if not self._group:
            if not ledger.is_running(request_id):
                ledger.claim_share(request_id, first, state.shared_hit_units(request_id))
            state.pages.promise(request_id, -(-num_tokens // state.page_tokens))
            ledger.grow_tail(request_id, first, end - first)
        new_ids = [ledger.tail_block(request_id, i, self._group) for i in range(first, end)]
        new_blocks = [self.block_pool.blocks[block] for block in new_ids]
        table.extend(new_blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(new_ids)
        return new_blocks

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Take full blocks of processed tokens out of the tail; the lead does, for all groups."""
        if self._group:
            return
        if self._hit_blocks:
            self._offer_hit(request_id, processed_computed_tokens)
        end = processed_computed_tokens // self.block_size
        first = self._num_null.get(request_id, 0)
        if end <= first or request_id not in self.req_to_blocks:
            return
        state = self._bound_state()
        end = min(end, len(self.req_to_blocks[request_id]))
        state.ledger.absorb_tail(request_id, end)
        for manager in state.latent:
            manager._clear_head(request_id, end)

    def _clear_head(self, request_id: str, end: int) -> None:
        first = self._num_null.get(request_id, 0)
        self.req_to_blocks[request_id][first:end] = [self._null_block] * (end - first)
        self._num_null[request_id] = end

    def _offer_hit(self, request_id: str, num_processed_tokens: int) -> None:
        """Let the rows of a prefix hit be restored, once a step of the request is processed.

        Another request may have computed them in the step that found the hit, so their
        host rows are certain only then.
        """
        hit = self._hit_blocks.get(request_id, 0)
        if hit and num_processed_tokens > hit * self.block_size:
            del self._hit_blocks[request_id]
            self._bound_state().missing.miss(Span(request_id, i) for i in range(hit))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """End the request, however it ends, and return its tail blocks."""
        if not self._group:
            state = self._bound_state()
            state.end_request(request_id)
        self._hit_blocks.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _bound_state(self) -> "SchedulerState":
        if self._state is None:
            raise RuntimeError(
                "latent KV groups of DHISPARSE need the DHiSparse connector, which was not bound "
                "to the KV cache manager"
            )
        return self._state


def register_latent_spec() -> None:
    """Make vLLM know the latent spec and its manager; repeated calls are fine.

    Every process that plans or manages the KV cache has to call it.
    """
    # vLLM registers its own specs only into an empty registry.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        DHiSparseLatentSpec, DHiSparseManager, uniform_type_base_spec=DHiSparseLatentSpec
    )
