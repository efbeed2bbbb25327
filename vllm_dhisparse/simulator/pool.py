"""A pool of integer blocks with the free queue of vLLM's, for the ledger and the pages."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

from vllm_dhisparse.core.block_source import ReuseListener


class SimulatedPool:
    """A ``BlockSource`` of plain numbers.

    Attributes:
        cached: blocks that a prefix hash names; empty unless a caller says so.

    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._queue = OrderedDict.fromkeys(range(num_blocks))
        self._references = [0] * num_blocks
        self.cached: set[int] = set()
        self._watched: set[int] = set()
        self._listeners: list[ReuseListener] = []

    @property
    def queue(self) -> list[int]:
        """Free blocks, the next to be reused first."""
        return list(self._queue)

    def reorder(self, queue: Sequence[int]) -> None:
        """Give the free blocks another order."""
        assert sorted(queue) == sorted(self._queue)
        self._queue = OrderedDict.fromkeys(queue)

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return len(self._queue)

    def add_reuse_listener(self, listener: ReuseListener) -> None:
        """Tell ``listener`` of reuses."""
        self._listeners.append(listener)

    def take(self, count: int) -> list[int]:
        """Take blocks off the head of the queue."""
        if count > len(self._queue):
            raise ValueError(f"{count} blocks wanted, {len(self._queue)} are free")
        taken = [self._queue.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._reuse(block)
        return taken

    def claim(self, blocks: Sequence[int]) -> None:
        """Take these free blocks out of the queue."""
        for block in blocks:
            del self._queue[block]
            self._watched.add(block)
            self._reuse(block)

    def pin(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if not self._references[block]:
                del self._queue[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference; plain free blocks go to the head, the first of them foremost."""
        free = [block for block in blocks if self._drop(block)]
        for block in free:
            self._queue[block] = None
        for block in reversed(free):
            if block not in self.cached:
                self._queue.move_to_end(block, last=False)

    def release_readable(self, blocks: Sequence[int]) -> None:
        """Drop a reference; free blocks go to the tail of the queue."""
        self._watched.update(blocks)
        for block in blocks:
            if self._drop(block):
                self._queue[block] = None

    def watch(self, blocks: Sequence[int]) -> None:
        """Report the next reuse of blocks in use."""
        assert all(self._references[block] for block in blocks)
        self._watched.update(blocks)

    def evict_prefix(self, blocks: Sequence[int]) -> None:
        """Forget the prefix hashes of blocks, and let free ones be reused first."""
        self.cached.difference_update(blocks)
        for block in blocks:
            if block in self._queue:
                self._queue.move_to_end(block, last=False)

    def is_cached(self, block: int) -> bool:
        """Whether a prefix hash names the block."""
        return block in self.cached

    def is_referenced(self, block: int) -> bool:
        """Whether anything holds the block."""
        return self._references[block] > 0

    def plain_head(self, is_known: Callable[[int], bool]) -> list[int]:
        """Return the blocks at the head of the queue, up to the first cached or known one."""
        return list(takewhile(lambda b: b not in self.cached and not is_known(b), self._queue))

    def _reuse(self, block: int) -> None:
        assert self._references[block] == 0
        self._references[block] = 1
        if block in self._watched:
            self._watched.remove(block)
            for listener in self._listeners:
                listener(block)
        self.cached.discard(block)

    def _drop(self, block: int) -> bool:
        assert self._references[block] > 0
        self._references[block] -= 1
        return not self._references[block]
