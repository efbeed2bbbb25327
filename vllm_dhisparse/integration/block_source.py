"""vLLM's BlockPool as the ``BlockSource`` of the ledger and the page allocator."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_dhisparse.core.block_source import ReuseListener


class PoolBlockSource:
    """Adapter on public calls of the pool.

    The pool keeps one watcher for each block id and replaces it silently, so every
    registration here names the same method, which tells all listeners.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._listeners: list[ReuseListener] = []

    @property
    def num_blocks(self) -> int:
        """Blocks without the null block."""
        return self._pool.num_gpu_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self._pool.get_num_free_blocks()

    def add_reuse_listener(self, listener: ReuseListener) -> None:
        """Tell ``listener`` of every reported reuse, as long as this source lives."""
        self._listeners.append(listener)

    def take(self, count: int) -> list[int]:
        """Take blocks off the head of the free queue."""
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def claim(self, blocks: Sequence[int]) -> None:
        """Take these free blocks, and tell the listeners as an allocation would."""
        claimed = self._blocks(blocks)
        self._pool.evict_blocks({b.block_id for b in claimed if b.block_hash is not None})
        self._pool.touch(claimed)
        for listener in self._listeners:
            for block in blocks:
                listener(block)

    def pin(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        self._pool.touch(self._blocks(blocks))

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block."""
        held = self._blocks(blocks)
        # The pool would count below zero and hand the block out twice.
        assert all(block.ref_cnt > 0 for block in held), "a block is freed twice"
        self._pool.free_blocks(held)

    def release_readable(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block and report its reuse."""
        self._pool.unpin_blocks(self._blocks(blocks), self._on_reuse)

    def watch(self, blocks: Sequence[int]) -> None:
        """Report the next reuse of blocks in use."""
        watched = self._blocks(blocks)
        assert all(block.ref_cnt > 0 for block in watched)
        # The only public way to register a watcher also drops a reference.
        self._pool.touch(watched)
        self._pool.unpin_blocks(watched, self._on_reuse)

    def evict_prefix(self, blocks: Iterable[int]) -> None:
        """Forget the prefix hashes of the blocks."""
        self._pool.evict_blocks(set(blocks))

    def is_cached(self, block: int) -> bool:
        """Whether a prefix hash names the block."""
        return self._pool.blocks[block].block_hash is not None

    def is_referenced(self, block: int) -> bool:
        """Whether anything holds the block."""
        return self._pool.blocks[block].ref_cnt > 0

    def first_free(self, count: int) -> tuple[list[int], list[int]]:
        """Return free blocks from the head of the queue on, and which are cached."""
        # The queue is no public interface of the pool, and its order is in no other place.
        # A step walks over hundreds of blocks, hence no iterator over them.
        blocks: list[int] = []
        cached: list[int] = []
        queue = self._pool.free_block_queue
        block, end = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        for place in range(count):
            if block is end:
                break
            assert block is not None, "the free queue is broken"
            blocks.append(block.block_id)
            if block.block_hash is not None:
                cached.append(place)
            block = block.next_free_block
        return blocks, cached

    def _blocks(self, blocks: Iterable[int]) -> list[KVCacheBlock]:
        all_blocks = self._pool.blocks
        return [all_blocks[block] for block in blocks]

    def _on_reuse(self, block: KVCacheBlock) -> None:
        assert block is self._pool.blocks[block.block_id], "a block of another pool"
        self._tell(block.block_id)

    def _tell(self, block: int) -> None:
        for listener in self._listeners:
            listener(block)
