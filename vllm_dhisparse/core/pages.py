"""Host pages by indexer block: binding, promises to admitted requests, and eviction."""

from collections import OrderedDict
from collections.abc import Sequence

from vllm_dhisparse.core.block_source import BlockSource
from vllm_dhisparse.core.commands import Command, PageBound, PageDropped


class PageAllocator:
    """Host pages bound to the blocks of the first indexer group.

    A bound block is *held* by running requests, *ended* (its last request ended, but
    something may still reference it: a step in flight, or a request that was admitted
    and not yet seen here), or *idle* (only a prefix hit may still claim it). Pages of
    idle blocks count as room: they are evicted when a step needs them, in the order
    in which their blocks entered the pool's queue.

    Within a scheduler step: ``expect_hit`` and ``fits`` while a request is considered,
    ``promise`` when it gets its blocks, ``hold`` once it is admitted, ``bind`` when the
    step is complete.

    Args:
        source: the pool of the indexer blocks.
        num_pages: host pages.
        log: where the commands go, in the order things happen.

    """

    def __init__(self, source: BlockSource, num_pages: int, log: list[Command]) -> None:
        self.num_pages = num_pages
        self._source = source
        self._log = log
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._page_of_block: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._ended: dict[int, None] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._bound: dict[str, list[int]] = {}
        self._expected: dict[str, int] = {}
        self._promised: dict[str, int] = {}
        self._num_promised = 0
        self.num_shared = 0
        """Pages of running requests, each counted once less than it has holders."""
        source.add_reuse_listener(self._drop_if_bound)

    @property
    def num_free(self) -> int:
        """Pages that no block owns."""
        return len(self._free_pages)

    @property
    def num_idle(self) -> int:
        """Pages that only a prefix hit could still claim."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages of running requests."""
        return len(self._holders)

    def room(self) -> int:
        """Pages that a request may need in this step: free or evictable, not promised."""
        ended_in_use = sum(map(self._source.is_referenced, self._ended))
        return self.num_pages - len(self._holders) - ended_in_use - self._num_promised

    def num_bound(self, request_id: str) -> int:
        """Leading indexer blocks of the request whose pages are known to be bound."""
        return len(self._bound.get(request_id, ()))

    def expect_hit(self, request_id: str, hit_blocks: Sequence[int]) -> None:
        """Note the prefix hit of a request that is about to be considered.

        Blocks that are in use anyway cost it no page; idle ones do, as they stop being
        evictable.
        """
        self._expected[request_id] = sum(
            block in self._holders or (block in self._ended and self._source.is_referenced(block))
            for block in hit_blocks
        )

    def need(self, request_id: str, num_blocks: int) -> int:
        """Pages that the request takes out of ``room`` to have ``num_blocks`` blocks."""
        if request_id in self._bound:
            return max(num_blocks - len(self._bound[request_id]), 0)
        return num_blocks - self._expected.get(request_id, 0)

    def fits(self, request_id: str, num_blocks: int) -> bool:
        """Whether pages for ``num_blocks`` blocks of the request can be had in this step."""
        if self._has_pages(request_id, num_blocks):
            return True
        need = self.need(request_id, num_blocks) - self._promised.get(request_id, 0)
        # Free and idle pages are at hand; only when they do not suffice count the ended.
        at_hand = len(self._free_pages) + len(self._idle) - self._num_promised
        return need <= 0 or need <= at_hand or need <= self.room()

    def promise(self, request_id: str, num_blocks: int) -> None:
        """Set aside what the request needs, until ``bind`` or the end of the step."""
        if request_id in self._promised or not self._has_pages(request_id, num_blocks):
            self._set_promise(request_id, self.need(request_id, num_blocks))

    def promised(self) -> list[str]:
        """Return the requests that have blocks without a page."""
        return list(self._promised)

    def hold(self, request_id: str, blocks: Sequence[int]) -> None:
        """Keep the pages that an admitted request found by its prefix hit.

        Args:
            request_id: the request, now running.
            blocks: all its indexer blocks; the leading ones with a page are the hit.

        """
        assert request_id not in self._bound
        self._expected.pop(request_id, None)
        hit = []
        for block in blocks:
            if block not in self._page_of_block:
                break
            self._add_holder(block)
            hit.append(block)
        self._bound[request_id] = hit
        self._set_promise(request_id, len(blocks) - len(hit))

    def bind(self, request_id: str, new_blocks: Sequence[int]) -> None:
        """Give pages to the request's blocks after the ``num_bound`` first ones.

        Evicts idle pages when none is free.
        """
        self._set_promise(request_id, 0)
        unwatched = []
        for block in new_blocks:
            if block not in self._page_of_block:
                self._page_of_block[block] = page = self._take_page()
                self._log.append(PageBound(page, block))
                unwatched.append(block)
            self._add_holder(block)
        self._bound.setdefault(request_id, []).extend(new_blocks)
        self._source.watch(unwatched)

    def end_request(self, request_id: str) -> None:
        """Let go of what the request holds and expects; unknown requests are fine.

        Its blocks may still be referenced during this call; the last are let go first,
        as vLLM does.
        """
        self._expected.pop(request_id, None)
        self._set_promise(request_id, 0)
        for block in reversed(self._bound.pop(request_id, ())):
            self._holders[block] -= 1
            if self._holders[block]:
                self.num_shared -= 1
            else:
                del self._holders[block]
                self._ended[block] = None

    def end_step(self) -> None:
        """Withdraw promises that nobody bound, and take back pages that nobody can hit."""
        self._promised.clear()
        self._num_promised = 0
        self._sort_ended()

    def page_of(self, block: int) -> int | None:
        """Return the page of a block, or None."""
        return self._page_of_block.get(block)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        pages = [*self._free_pages, *self._page_of_block.values()]
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or owned twice"
        owners = [*self._holders, *self._ended, *self._idle]
        assert len(owners) == len(set(owners)), "a block is held and not held"
        assert set(owners) == set(self._page_of_block)
        assert self._num_promised == sum(self._promised.values())
        held: dict[int, int] = {}
        for blocks in self._bound.values():
            for block in blocks:
                held[block] = held.get(block, 0) + 1
                assert self._source.is_referenced(block), "a running request lost a block"
        assert held == self._holders
        assert self.num_shared == sum(held.values()) - len(held)
        for block in self._idle:
            assert not self._source.is_referenced(block), "an idle block is in use"

    def _has_pages(self, request_id: str, num_blocks: int) -> bool:
        # So it is in most steps of most requests.
        bound = self._bound.get(request_id)
        return bound is not None and num_blocks <= len(bound)

    def _set_promise(self, request_id: str, num_pages: int) -> None:
        old = self._promised.pop(request_id, 0)
        if num_pages > 0:
            self._promised[request_id] = num_pages
        self._num_promised += max(num_pages, 0) - old

    def _add_holder(self, block: int) -> None:
        if block in self._holders:
            self._holders[block] += 1
            self.num_shared += 1
        else:
            self._holders[block] = 1
            self._ended.pop(block, None)
            self._idle.pop(block, None)

    def _sort_ended(self) -> None:
        released = [block for block in self._ended if not self._source.is_referenced(block)]
        for block in released:
            if self._source.is_cached(block):
                del self._ended[block]
                self._idle[block] = None
            else:
                self._drop_if_bound(block)

    def _take_page(self) -> int:
        if not self._free_pages:
            self._sort_ended()
        if not self._free_pages:
            # Not while requests are admitted: the block could be part of a hit just found.
            # An idle block in use belongs to a request of this step that is bound later.
            block = next(idle for idle in self._idle if not self._source.is_referenced(idle))
            self._source.evict_prefix([block])
            self._drop_if_bound(block)
        return self._free_pages.pop()

    def _drop_if_bound(self, block: int) -> None:
        page = self._page_of_block.pop(block, None)
        if page is None:
            return  # the block's page went before the block did, or it is a block of a unit
        assert block not in self._holders, "a block of a running request was reused"
        self._ended.pop(block, None)
        self._idle.pop(block, None)
        self._free_pages.append(page)
        self._log.append(PageDropped(page, block))
