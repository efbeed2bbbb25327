"""What the engine core knows of units and host pages, with the moments a connector passes on."""

from collections.abc import Iterable

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_dhisparse.core.adaptation import AdaptiveResidency, HostPlace
from vllm_dhisparse.core.commands import Command, StepCommands, UnitState
from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.core.ledger import Ledger, LedgerResidency
from vllm_dhisparse.core.pages import PageAllocator
from vllm_dhisparse.core.spans import MissingSpans, Span
from vllm_dhisparse.integration.block_source import PoolBlockSource
from vllm_dhisparse.integration.draft_lengths import DraftLengths, GrowingTables
from vllm_dhisparse.integration.draft_ring import draft_rings
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
        num_drafts: draft tokens of a request at most.

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
        num_drafts: int = 0,
    ) -> None:
        managers = kv_cache_manager.coordinator.single_type_managers
        latent = [m for m in managers if isinstance(m, DHiSparseManager)]
        indexer = [m for m in managers if is_indexer_spec(m.kv_cache_spec)]
        if not latent or not indexer:
            specs = ", ".join(type(m.kv_cache_spec).__name__ for m in managers)
            raise ValueError(f"DHISPARSE needs latent and indexer KV groups, got: {specs}")
        self._managers: tuple[SingleTypeKVCacheManager, ...] = managers
        self.latent = latent
        self._address = indexer[0]
        """The group whose blocks own host pages; every leader uses its block table."""
        self._pool = kv_cache_manager.block_pool
        spec = latent[0].kv_cache_spec
        self.page_tokens: int = self._address.block_size
        self._block_tokens: int = latent[0].block_size
        self.max_tail_blocks: int = spec.max_tail_blocks(
            max_in_flight_tokens, num_lookahead_tokens, kv_cache_manager.max_model_len
        )
        self._num_steps = 0
        self._log: list[Command] = []
        self._source = PoolBlockSource(self._pool)
        self.missing = MissingSpans()
        self.ledger = Ledger(
            self._source,
            len(latent),
            spec.base_units_per_request,
            residency,
            self._log,
            self.missing,
        )
        self.pages = PageAllocator(self._source, num_pages, self._log)
        self._indexer_groups = len(indexer)
        rings = draft_rings(kv_cache_manager)
        self._ring_blocks = sum(manager.ring_blocks for manager in rings)
        """Of one request."""
        full_drafts = [m for m in managers if m not in latent and m not in indexer + rings]
        self._draft_block_tokens = [m.block_size for m in full_drafts]
        """Of draft KV that grows with the context."""
        self._draft_lengths = DraftLengths(
            [
                GrowingTables(latent[0].req_to_blocks, self._block_tokens, len(latent)),
                GrowingTables(self._address.req_to_blocks, self.page_tokens, len(indexer)),
                *(GrowingTables(m.req_to_blocks, m.block_size, 1) for m in full_drafts),
            ],
            num_drafts,
            num_lookahead_tokens,
            max_in_flight_tokens,
            kv_cache_manager.max_model_len,
        )
        self._is_adaptive = residency == "adaptive"
        self._page_units = self.page_tokens // self._block_tokens
        self._shared_hits: dict[str, int] = {}
        """Units by request that vLLM looks at in this step."""
        self._admitted: set[str] = set()
        """Requests of this step."""
        self._considered: dict[str, int] = {}
        """Blocks that requests require which vLLM looked at in this step and did not admit."""
        self.waiting_blocks = 0
        """What the next waiting request required in the last step."""
        self._page_waits = 0
        for group, manager in enumerate(latent):
            manager.bind(self, group)

    def begin_step(self) -> None:
        """Cut drafts to the room there is; before vLLM schedules anything of a step."""
        if self._is_adaptive:
            self._draft_lengths.cut(self._pool.get_num_free_blocks(), self.waiting_blocks)

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
        num_shared = sum(map(self._source.is_referenced, hit))
        self._shared_hits[request.request_id] = num_shared * self._page_units

    def shared_hit_units(self, request_id: str) -> int:
        """Return units of a considered request's hit that other requests have too."""
        return self._shared_hits.get(request_id, 0)

    def end_request(self, request_id: str) -> None:
        """Forget a request, however it ends; unknown ones are fine."""
        self.pages.end_request(request_id)
        self._draft_lengths.remove(request_id)
        self._shared_hits.pop(request_id, None)
        # Those admitted in this step may not be known to share pages yet.
        pending = sum(map(self._shared_hits.__getitem__, self._admitted & self._shared_hits.keys()))
        self.ledger.end_request(request_id, self._shared_units() + pending)

    def consider(self, request_id: str, latent_blocks: int, page_blocks: int) -> None:
        """Note what a request requires that vLLM would like to admit."""
        blocks = latent_blocks + page_blocks * self._indexer_groups + self._ring_blocks
        self._considered[request_id] = blocks

    def lacks_pages(self, request_id: str, page_blocks: int) -> bool:
        """Return, and count, whether a request finds no host pages for so many blocks."""
        if self.pages.fits(request_id, page_blocks):
            return False
        self._page_waits += 1
        return True

    def take_page_waits(self) -> int:
        """Return how often host pages were missing, and start again."""
        waits, self._page_waits = self._page_waits, 0
        return waits

    def on_admitted(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Keep the pages of the prefix hit; for ``update_state_after_alloc``."""
        self._considered.pop(request.request_id, None)
        self._admitted.add(request.request_id)
        self._draft_lengths.add(request)
        group = blocks.blocks[self._address.kv_cache_group_id]
        self.pages.hold(request.request_id, [block.block_id for block in group])

    def bind_scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """Give pages to all new indexer blocks of the step; for ``build_connector_meta``."""
        tables = self._address.req_to_blocks
        pages = self.pages
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in filter(scheduled.__contains__, pages.promised()):
            new = tables[request_id][pages.num_bound(request_id) :]
            pages.bind(request_id, [block.block_id for block in new])
        pages.end_step()
        self._shared_hits.clear()
        self._admitted.clear()
        self.ledger.settle(self._shared_units())
        self.waiting_blocks = next(iter(self._considered.values()), 0)
        self._considered.clear()

    def residency(self, controller: ResidencyController) -> AdaptiveResidency:
        """Return the loop in which the controller uses spare memory; after ``bind_scheduled``."""
        return AdaptiveResidency(
            controller, self.ledger, self._source.num_blocks, self.missing, self.place_of
        )

    @property
    def draft_tokens(self) -> int:
        """Draft tokens that each request could have in this step."""
        return self._draft_lengths.limit

    def growth_blocks(self, num_tokens: int) -> int:
        """Blocks that a step of so many tokens may take in all groups, admissions aside."""
        latent = cdiv(num_tokens, self._block_tokens) * self.ledger.num_groups
        draft = sum(cdiv(num_tokens, tokens) for tokens in self._draft_block_tokens)
        return latent + cdiv(num_tokens, self.page_tokens) * self._indexer_groups + draft

    def share_blocks(self) -> int:
        """Blocks that a request takes on admission, whatever its length."""
        return self.ledger.base_units * self.ledger.num_groups + self._ring_blocks

    def _shared_units(self) -> int:
        return self.pages.num_shared * self._page_units

    def place_of(self, span: Span) -> HostPlace:
        """Return where the rows of a running request's span lie in host memory."""
        first_token = span.position * self._block_tokens
        table = self._address.req_to_blocks[span.request_id]
        page = self.pages.page_of(table[first_token // self.page_tokens].block_id)
        assert page is not None, "a running request without a page"
        return HostPlace(page, first_token % self.page_tokens)

    def take_commands(self) -> StepCommands:
        """Return the step's commands; last in ``build_connector_meta``, also for empty steps."""
        commands = StepCommands(self._num_steps, self.ledger.take_commands())
        self._num_steps += 1
        return commands

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
                if manager not in self.latent:
                    others.update(block for _, block in real)
                    continue
                group = self.latent.index(manager)
                for position, block in real:
                    assert self.ledger.tail_block(request_id, position, group) == block
                    tails.append(block)
        assert sorted(tails) == sorted(by_state[UnitState.TAIL]), "a tail unit is not whole"
        free = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
        assert set(by_state[UnitState.OPTIONAL]) <= set(free), "an optional unit is not free"
        late = {block for block in deferred_blocks if block not in others}
        uses = [*free, *tails, *by_state[UnitState.REQUIRED], *others, *late]
        assert sorted(uses) == sorted(set(uses)), "a block has two uses"
        assert len(uses) == self._source.num_blocks, "a block has no use"
