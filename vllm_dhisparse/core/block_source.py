"""What the ledger and the page allocator need of a pool of device blocks, on integer ids."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

ReuseListener: TypeAlias = Callable[[int], None]
"""Called with a block id when the pool hands the block out for something new.

The pool is in the middle of an allocation then: a listener only updates its own
records and calls nothing of the ``BlockSource``.
"""


class BlockSource(Protocol):
    """A reference-counted pool of blocks with a queue of free ones, first reused at its head."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out, free or not."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks in the free queue, readable ones among them."""
        ...

    def add_reuse_listener(self, listener: ReuseListener) -> None:
        """Tell ``listener`` of every reuse of a block released readable, watched or claimed.

        A block may be reported long after the listener lost interest in it.
        """
        ...

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks off the head of the free queue, one reference each.

        Raises:
            ValueError: fewer than ``count`` blocks are free.

        """
        ...

    def claim(self, blocks: Sequence[int]) -> None:
        """Take these plain free blocks out of the queue, and tell the listeners of each."""
        ...

    def pin(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; a free block leaves the queue and keeps its content."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference; blocks without one become plain free blocks at the queue's head."""
        ...

    def release_readable(self, blocks: Sequence[int]) -> None:
        """Drop a reference; blocks join the queue's tail, readable until a listener hears."""
        ...

    def watch(self, blocks: Sequence[int]) -> None:
        """Report the next reuse of blocks in use; their references stay as they are."""
        ...

    def evict_prefix(self, blocks: Sequence[int]) -> None:
        """Forget the prefix hashes of the blocks; free ones go to the head of the queue."""
        ...

    def is_cached(self, block: int) -> bool:
        """Whether a prefix hash names the block."""
        ...

    def is_referenced(self, block: int) -> bool:
        """Whether anything holds the block."""
        ...

    def plain_head(self, is_known: Callable[[int], bool]) -> list[int]:
        """Return the blocks at the head of the queue, up to the first cached or known one."""
        ...
