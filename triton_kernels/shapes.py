"""Block sizes of the kernels.

The interpreter takes tens of microseconds for an operation whatever its size, so it gets
few large blocks; but several tiles, so that tests see their seams.
"""

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret

TILE = 256 if INTERPRETED else 1024
"""Words of a bitmap, slots, or rows of a union."""

SUM_BLOCK = 16 if INTERPRETED else 1024
"""Tiles that a program adds up at once."""

SELECTIONS = 4096 if INTERPRETED else 1024
TOKENS = 64 if INTERPRETED else 1024
HEADS = 16
KEYS = 16 if INTERPRETED else 32
SPLIT_KEYS = 32 if INTERPRETED else 512
"""Keys of a query for one program; a constant, so that results do not depend on the batch."""

ATTENTION_WARPS = 8
TAKING_WARPS = 8
"""Of ``take_slots``: with four, triton 3.8 spills on sm_100."""
DECODED_ROWS = 64 if INTERPRETED else 16

_COPIED = 1 << 16 if INTERPRETED else 2048  # elements of a program
_WIDEST = 512
ELEMENTS = {1: tl.uint8, 4: tl.int32}


def next_power_of_two(size: int) -> int:
    """Return the least power of two that is not below ``size``, at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def copy_block(width: int) -> tuple[int, int]:
    """Return elements of a row that are copied at once, and rows of a program."""
    block = min(next_power_of_two(width), _WIDEST)
    return block, _COPIED // block
