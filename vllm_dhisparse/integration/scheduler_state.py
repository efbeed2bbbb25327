"""What the engine core knows of units and host pages, with the moments a connector passes on."""

from collections.abc import Iterable

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_dhisparse.core.commands import Command, StepCommands, UnitState
from vllm_dhisparse.core.ledger import Ledger, LedgerResidency
from vllm_dhisparse.core.pages import PageAllocator
from vllm_dhisparse.integration.block_source import PoolBlockSource
from vllm_dhisparse.integration.kv_spec import is_indexer_spec
from vllm_dhisparse.integration.manager import DHiSparseManager


class SchedulerState:
    """Ledger, host pages and their pool, for all latent groups of one engine.

    The end of a request, preemption included, arrives through the latent managers:
    vLLM tells the connector only of requests that finish.

    Args:
        kv_cache_manager: vLLM's, as given to ``bind_kv_cache_manager``.
        num_pages: host pages of the engine.
        residency: ``fixed`` or ``adaptive``.
        max_in_flight_tokens: vLLM's bound on scheduled and unprocessed tokens.
        num_lookahead_tokens: vLLM's slots beyond the scheduled tokens.

    Raises:
        ValueError: the KV cache has no latent or no indexer group.

    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        num_pages: int,
        residency: LedgerResidency,
        max_in_flight_tokens: int,
        num_lookahead_tokens: int,
    ) -> None:
        managers = kv_cache_manager.coordinator.single_type_managers
        latent = [m for m in managers if isinstance(m, DHiSparseManager)]
        indexer = [m for m in managers if is_indexer_spec(m.kv_cache_spec)]
        if not latent or not indexer:
            specs = ", ".join(type(m.kv_cache_spec).__name__ for m in managers)
            raise ValueError(f"DHISPARSE needs latent and indexer KV groups, got: {specs}")
        self._managers: tuple[SingleTypeKVCacheManager, ...] = managers
        self._latent = latent
        self._address = indexer[0]
        """The group whose blocks own host pages; every leader uses its block table."""
        self._pool = kv_cache_manager.block_pool
        spec = latent[0].kv_cache_spec
        self.page_tokens: int = self._address.block_size
        self.max_tail_blocks: int = spec.max_tail_blocks(
            max_in_flight_tokens, num_lookahead_tokens, kv_cache_manager.max_model_len
        )
        self._step = 0
        log: list[Command] = []
        self._source = PoolBlockSource(self._pool)
        self.ledger = Ledger(self._source, len(latent), spec.base_units_per_request, residency, log)
        self.pages = PageAllocator(self._source, num_pages, log)
        for group, manager in enumerate(latent):
            manager.bind(self, group)

    def on_new_request(self, request: Request, num_local_computed_tokens: int) -> None:
        """Note the prefix hit of a request that vLLM considers; it may yet be refused.

        For ``get_num_new_matched_tokens``, which comes between lookup and admission.
        """
        num_hit_blocks = num_local_computed_tokens // self.page_tokens
        hit: list[int] = []
        if num_hit_blocks:
            hashes = resolve_block_hashes(
                request.block_hashes, self._pool.hash_block_size, self.page_tokens
            )
            group = [self._address.kv_cache_group_id]
            for block_hash in hashes[:num_hit_blocks]:
                found = self._pool.get_cached_block(block_hash, group)
                assert found is not None, "a prefix hit lost a block"
                hit.append(found[0].block_id)
        self.pages.expect_hit(request.request_id, hit)

    def on_admitted(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Keep the pages of the prefix hit; for ``update_state_after_alloc``."""
        group = blocks.blocks[self._address.kv_cache_group_id]
        self.pages.hold(request.request_id, [block.block_id for block in group])

    def bind_scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """Give pages to all new indexer blocks of the step; for ``build_connector_meta``."""
        tables = self._address.req_to_blocks
        pages = self.pages
        for request_id in scheduler_output.num_scheduled_tokens:
            table = tables[request_id]
            num_bound = pages.num_bound(request_id)
            if num_bound < len(table):
                pages.bind(request_id, [block.block_id for block in table[num_bound:]])
        pages.end_step()

    def take_commands(self) -> StepCommands:
        """Return the step's commands; last in ``build_connector_meta``, also for empty steps."""
        self._step += 1
        return StepCommands(self._step, self.ledger.take_commands())

    def check_integrity(self, deferred_blocks: Iterable[int] = ()) -> None:
        """Assert that every block has one use; for tests, its cost grows with the pool.

        Args:
            deferred_blocks: blocks of ended requests that vLLM frees later.

        """
        self.ledger.check_integrity()
        self.pages.check_integrity()
        by_state = self.ledger.blocks_by_state()
        tails: list[int] = []
        others: set[int] = set()
        for manager in self._managers:
            for request_id, table in manager.req_to_blocks.items():
                real = [(i, b.block_id) for i, b in enumerate(table) if not b.is_null]
                if manager not in self._latent:
                    others.update(block for _, block in real)
                    continue
                group = self._latent.index(manager)
                for position, block in real:
                    assert self.ledger.tail_block(request_id, position, group) == block
                    tails.append(block)
        assert sorted(tails) == sorted(by_state[UnitState.TAIL]), "a tail unit is not whole"
        free = [block for block, _ in self._source.walk_free()]
        assert set(by_state[UnitState.OPTIONAL]) <= set(free), "an optional unit is not free"
        late = {block for block in deferred_blocks if block not in others}
        uses = [*free, *tails, *by_state[UnitState.REQUIRED], *others, *late]
        assert sorted(uses) == sorted(set(uses)), "a block has two uses"
        assert len(uses) == self._source.num_blocks, "a block has no use"
