"""Union of selections by a bitmap over host rows; no sort, no hash.

Selections of one request are collected in a bitmap over its positions, which fits in
the first-level cache, and moved to the bitmap over host rows one word of 64 rows at a
time; a word lies in one page, because pages hold a multiple of 64 rows.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, lowest_bit, prefetch

Words = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)
_AHEAD = 24  # rows between the prefetch of a map entry and its use


@compiled
def mark(
    selected: Int32s,
    first: int,
    last: int,
    request_of_token: Int32s,
    visible: Int32s,
    block_table: Int32s,
    page_of_block: Int32s,
    page_words: int,
    is_prefill: Bytes,
    positions: Words,
    union: Words,
    kept: Words,
) -> bool:
    """Set the bits of all rows that tokens ``first .. last`` select.

    ``kept`` gets the rows of requests that are not in prefill. False when a selected
    position has no host page.
    """
    token = first
    while token < last:
        request = request_of_token[token]
        end, words = token, 0
        while end < last and request_of_token[end] == request:
            words = max(words, (visible[end] + 63) >> 6)
            end += 1
        if request >= 0 and words > 0:
            if words > positions.size:
                return False
            positions[:words] = 0
            for row in range(token, end):
                limit = np.uint32(visible[row])
                for rank in range(selected.shape[1]):
                    position = np.uint32(selected[row, rank])
                    if position < limit:
                        positions[position >> 6] |= _ONE << (np.uint64(position) & _LOW_BITS)
            for word in range(words):
                bits = positions[word]
                if bits:
                    page = page_of_block[block_table[request, word // page_words]]
                    if page < 0:
                        return False
                    place = page * page_words + word % page_words
                    union[place] |= bits
                    if not is_prefill[request]:
                        kept[place] |= bits
        token = end
    return True


@compiled
def count(union: Words) -> int:
    """Return the number of rows in a bitmap."""
    total = 0
    for word in range(union.size):
        total += count_bits(union[word])
    return total


@compiled
def list_rows(union: Words, rows: Int32s, rank_of_word: Int32s) -> None:
    """Write the rows of a bitmap in order, and the rank of the first row of each word.

    ``rows`` has room for three more than there are.
    """
    rank = 0
    for word in range(union.size):
        bits = union[word]
        rank_of_word[word] = rank
        if not bits:
            continue
        # Four at a time without asking how many there are: the branch would be a guess.
        end = rank + count_bits(bits)
        while rank < end:
            for step in range(4):
                rows[rank + step] = (word << 6) + lowest_bit(bits)
                bits &= bits - _ONE
            rank += 4
        rank = end


@compiled
def look_up(
    rows: Int32s,
    slot_of_row: Int32s,
    slot_of_row_address: int,
    unit_state: Bytes,
    slot: Int32s,
    tier: Bytes,
    missing: Bytes,
) -> None:
    """Find slot and tier of each row, and which rows are at home only."""
    for rank in range(rows.size):
        if rank + _AHEAD < rows.size:
            prefetch(slot_of_row_address + 4 * rows[rank + _AHEAD])
        place = slot_of_row[rows[rank]]
        slot[rank] = place
        missing[rank] = place < 0
        tier[rank] = unit_state[place >> 6] if place >= 0 else np.uint8(0)


@compiled
def remap(
    selected: Int32s,
    first: int,
    last: int,
    request_of_token: Int32s,
    visible: Int32s,
    block_table: Int32s,
    page_of_block: Int32s,
    page_words: int,
    is_prefill: Bytes,
    union: Words,
    rank_of_word: Int32s,
    tier: Bytes,
    positions: Words,
    ranks: Int32s,
    out: Int32s,
    counted: NDArray[np.int64],
) -> None:
    """Turn positions into ranks in the union, and count selections by tier."""
    token = first
    while token < last:
        request = request_of_token[token]
        end, words = token, 0
        while end < last and request_of_token[end] == request:
            words = max(words, (visible[end] + 63) >> 6)
            end += 1
        if request < 0 or words == 0:
            out[token - first : end - first] = -1
            token = end
            continue
        for word in range(words):
            page = page_of_block[block_table[request, word // page_words]]
            place = page * page_words + word % page_words
            positions[word] = union[place] if page >= 0 else np.uint64(0)
            ranks[word] = rank_of_word[place] if page >= 0 else 0
        for row in range(token, end):
            limit = np.uint32(visible[row])
            packed = np.uint64(0)
            for rank in range(selected.shape[1]):
                position = np.uint32(selected[row, rank])
                if position < limit:
                    below = (_ONE << (np.uint64(position) & _LOW_BITS)) - _ONE
                    index = ranks[position >> 6] + count_bits(positions[position >> 6] & below)
                    out[row - first, rank] = index
                    packed += _ONE << (np.uint64(tier[index]) << np.uint64(4))
                else:
                    out[row - first, rank] = -1
            phase = np.int64(is_prefill[request])
            for group in range(4):
                shift = np.uint64(16 * group)
                counted[phase, group] += np.int64((packed >> shift) & np.uint64(0xFFFF))
        token = end
