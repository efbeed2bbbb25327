"""Bitmaps over host rows, a bit each in words of 32, and sums over the tiles of a grid."""

import triton
import triton.language as tl


@triton.jit
def count_bits(words):
    """Return the number of ones in each int32."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bit_of(rows):
    """Return the int32 word that has only the bit of each row; rows must not be negative."""
    one = tl.full(rows.shape, 1, tl.uint32)
    return (one << (rows & 31).to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def has_row(bitmap, rows, mask):
    """Whether each row is in a bitmap; False outside the mask."""
    words = tl.load(bitmap + (rows >> 5), mask=mask, other=0)
    return ((words >> (rows & 31)) & 1) != 0


@triton.jit
def rank_of(union, rank_of_word, rows, mask):
    """Return how many rows of the union lie below each row; 0 outside the mask."""
    words = tl.load(union + (rows >> 5), mask=mask, other=0)
    ranks = tl.load(rank_of_word + (rows >> 5), mask=mask, other=0)
    return ranks + count_bits(words & (bit_of(rows & 31) - 1))


@triton.jit
def sums_of_tiles(counts, tile, num_tiles, BLOCK: tl.constexpr):
    """Return the sum of the counts before a tile, and of all.

    Every program adds them up itself: they are few, and a launch for it costs more.
    """
    before = 0
    total = 0
    for first in range(0, num_tiles, BLOCK):
        index = first + tl.arange(0, BLOCK)
        count = tl.load(counts + index, mask=index < num_tiles, other=0)
        before += tl.sum(tl.where(index < tile, count, 0))
        total += tl.sum(count)
    return before, total
