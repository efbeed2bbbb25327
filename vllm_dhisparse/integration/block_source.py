"""vLLM's BlockPool as the ``BlockSource`` of the ledger and the page allocator."""

from collections.abc import Callable, Iterable, Sequence

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
        self._pool.touch(self._blocks(blocks))
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

    def evict_prefix(self, blocks: Sequence[int]) -> None:
        """Forget the prefix hashes of the blocks, and let free ones be reused first."""
        ids = set(blocks)
        self._pool.evict_blocks(ids)
        free = [block for block in self._blocks(ids) if not block.ref_cnt]
        self._pool.touch(free)
        self._pool.free_blocks(free)

    def is_cached(self, block: int) -> bool:
        """Whether a prefix hash names the block."""
        return self._pool.blocks[block].block_hash is not None

    def is_referenced(self, block: int) -> bool:
        """Whether anything holds the block."""
        return self._pool.blocks[block].ref_cnt > 0

    def plain_head(self, is_known: Callable[[int], bool]) -> list[int]:
        """Return the blocks at the head of the queue, up to the first cached or known one."""
        # The queue is no public interface of the pool, and its order is in no other place.
        blocks: list[int] = []
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if block.block_hash is not None or is_known(block.block_id):
                break
            blocks.append(block.block_id)
        return blocks

    def _blocks(self, blocks: Iterable[int]) -> list[KVCacheBlock]:
        all_blocks = self._pool.blocks
        return [all_blocks[block] for block in blocks]

    def _on_reuse(self, block: KVCacheBlock) -> None:
        block_id = block.block_id
        assert block is self._pool.blocks[block_id], "a block of another pool"
        for listener in self._listeners:
            listener(block_id)
