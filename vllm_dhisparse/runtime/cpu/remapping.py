"""From positions to indices into the union."""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, prefetch
from vllm_dhisparse.runtime.cpu.state import Asked, Bitmaps, Bytes, Int32s
from vllm_dhisparse.runtime.cpu.union import run_of_request

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)
_WORD_SHIFT = np.uint64(6)
_PAGES_AHEAD = np.uint64(16)  # pages between the prefetch of their words and its use


@compiled
def remap(
    asked: Asked,
    first: int,
    last: int,
    bitmaps: Bitmaps,
    tier: Bytes,
    out: Int32s,
    counted: NDArray[np.int64],
) -> None:
    """Turn positions into ranks in the union, and count selections by the tier at a rank."""
    token = first
    _, _, positions, ranks = bitmaps
    while token < last:
        request, end, words = run_of_request(asked, token, last)
        _fetch_words(asked, request, bitmaps, words, tier)
        for row in range(token, end):
            packed = np.uint64(0)  # four counters of 16 bits
            limit = np.uint64(max(asked.visible[row], 0) if words else 0)
            selected, answer = asked.selected[row], out[row - first]
            for rank in range(selected.size):
                position = np.uint64(np.uint32(selected[rank]))
                if position < limit:
                    at = position >> _WORD_SHIFT
                    below = (_ONE << (position & _LOW_BITS)) - _ONE
                    index = np.uint64(ranks[at]) + np.uint64(count_bits(positions[at] & below))
                    answer[rank] = np.int32(index)
                    packed += _ONE << (np.uint64(tier[index]) << np.uint64(4))
                else:
                    answer[rank] = -1
            phase = np.int64(asked.is_prefill[max(request, 0)]) if words else 0
            for group in range(4):
                shift = np.uint64(16 * group)
                counted[phase, group] += np.int64((packed >> shift) & np.uint64(0xFFFF))
        token = end


@compiled
def _fetch_words(asked: Asked, request: int, bitmaps: Bitmaps, size: int, tier: Bytes) -> None:
    """Copy the union and its ranks to where a request's positions are; ask for their tiers."""
    blocks, page_of_block = asked.block_table[max(request, 0)], asked.page_of_block
    union, rank_of_word, positions, ranks = bitmaps
    page_words, words = np.uint64(asked.page_rows >> 6), np.uint64(size)
    union_address, ranks_address = union.ctypes.data, rank_of_word.ctypes.data
    tier_address = tier.ctypes.data
    word, block = np.uint64(0), np.uint64(0)
    while word < words:
        if word + _PAGES_AHEAD * page_words < words:
            ahead = np.int64(page_of_block[blocks[block + _PAGES_AHEAD]]) * asked.page_rows >> 6
            prefetch(union_address + 8 * ahead)
            prefetch(ranks_address + 4 * ahead)
        place = np.uint64(max(page_of_block[blocks[block]], 0)) * page_words
        end = min(word + page_words, words)
        prefetch(tier_address + np.int64(rank_of_word[place]))
        while word < end:
            positions[word] = union[place]
            ranks[word] = rank_of_word[place]
            word += _ONE
            place += _ONE
        block += _ONE
