"""The plain free blocks of a pool: those whose reuse costs neither a prefix hit nor a unit."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from vllm_dhisparse.core.block_source import BlockSource


class PlainBlocks:
    """Plain blocks at the head of the free queue, all of them ahead of everything else.

    They are known by number, each watched for its reuse, so that nothing has to walk over
    the queue to know how many there are. Plain blocks join the queue at its head only, so
    those that are not known yet come first. The owner passes on what the pool reports.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        # the farthest from the head first; a dict would keep the places of those that went
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, is_other: Callable[[int], bool]) -> None:
        """Come to know what others put at the head of the queue since the last call.

        Args:
            is_other: whether a block is no plain one although no prefix hash names it.

        """
        known = self._blocks
        blocks = self._source.plain_head(lambda block: block in known or is_other(block))
        if blocks:
            self._source.claim(blocks)
            self._source.watch(blocks)
            self.put(blocks)

    def put(self, blocks: Sequence[int]) -> None:
        """Drop a reference to blocks that are watched; they become the head of the queue."""
        self._source.release(blocks)
        self._blocks.update(dict.fromkeys(reversed(blocks)))

    def take(self, count: int) -> list[int]:
        """Pin and return the ``count`` blocks farthest from the head, in their order."""
        blocks = list(islice(self._blocks, count))[::-1]
        for block in blocks:
            del self._blocks[block]
        self._source.pin(blocks)
        return blocks

    def discard(self, block: int) -> bool:
        """Forget a block that the pool has handed out; return whether it was known."""
        if block in self._blocks:
            del self._blocks[block]
            return True
        return False

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        for block in self._blocks:
            assert not self._source.is_referenced(block), "a plain block is in use"
            assert not self._source.is_cached(block)
