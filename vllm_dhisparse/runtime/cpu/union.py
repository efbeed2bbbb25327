"""Union of selections by a bitmap over host rows; no sort, no hash.

Selections of one request are collected in a bitmap over its positions, which fits in
the first-level cache, and moved to the bitmap over host rows one word of 64 rows at a
time; a word lies in one page, because pages hold a multiple of 64 rows.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, lowest_bit, prefetch

Words = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Bytes = NDArray[np.uint8]

IN_USE = np.uint8(0x80)
"""Set in the age of a slot that the step reads, during the step."""

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)
_WORD_SHIFT = np.uint64(6)
_MAX_AGE = np.uint8(MAX_AGE)
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
                limit, asked = np.uint64(max(visible[row], 0)), selected[row]
                for rank in range(asked.size):
                    position = np.uint64(np.uint32(asked[rank]))
                    if position < limit:
                        positions[position >> _WORD_SHIFT] |= _ONE << (position & _LOW_BITS)
            lost, block, place, left = np.uint64(0), 0, 0, 0
            for word in range(words):
                if left == 0:
                    page = page_of_block[block_table[request, block]]
                    place, left, block = max(page, 0) * page_words, page_words, block + 1
                bits = positions[word]
                lost |= bits if page < 0 else np.uint64(0)
                union[place] |= bits
                if not is_prefill[request]:
                    kept[place] |= bits
                place, left = place + 1, left - 1
            if lost:
                return False
        token = end
    return True


@compiled
def has(bitmap: Words, row: int) -> bool:
    """Whether a row is in a bitmap."""
    return bool((bitmap[row >> 6] >> (np.uint64(row) & _LOW_BITS)) & _ONE)


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

    ``rows`` has room for four more than there are.
    """
    rank = 0
    for word in range(union.size):
        bits = union[word]
        rank_of_word[word] = rank
        end = rank + count_bits(bits)
        # Four at a time without asking how many there are: the branch would be a guess.
        for step in range(4):
            rows[rank + step] = (word << 6) + lowest_bit(bits)
            bits &= bits - _ONE
        for place in range(rank + 4, end):
            rows[place] = (word << 6) + lowest_bit(bits)
            bits &= bits - _ONE
        rank = end


@compiled
def look_up(
    rows: Int32s,
    kept: Words,
    all_kept: bool,
    slot_of_row: Int32s,
    slot_of_row_address: int,
    unit_state: Bytes,
    age: Bytes,
    slot: Int32s,
    tier: Bytes,
    missing: Bytes,
) -> None:
    """Find slot and tier of each row, and which rows are at home only.

    Ages of the slots found get ``IN_USE``, those of kept rows the age of a hit too.
    """
    for rank in range(rows.size):
        if rank + _AHEAD < rows.size:
            prefetch(slot_of_row_address + 4 * rows[rank + _AHEAD])
        row = rows[rank]
        place = slot_of_row[row]
        slot[rank] = place
        missing[rank] = place < 0
        if place < 0:
            tier[rank] = 0
        else:
            tier[rank] = unit_state[place >> 6]
            if all_kept or has(kept, row):
                age[place] = IN_USE | _MAX_AGE
            else:
                age[place] |= IN_USE


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
        block, place, left = 0, 0, 0
        for word in range(words):
            if left == 0:
                place = max(page_of_block[block_table[request, block]], 0) * page_words
                left, block = page_words, block + 1
            positions[word] = union[place]
            ranks[word] = rank_of_word[place]
            place, left = place + 1, left - 1
        for row in range(token, end):
            packed = np.uint64(0)
            limit = np.uint64(max(visible[row], 0))
            asked, answer = selected[row], out[row - first]
            for rank in range(asked.size):
                position = np.uint64(np.uint32(asked[rank]))
                if position < limit:
                    at = position >> _WORD_SHIFT
                    below = (_ONE << (position & _LOW_BITS)) - _ONE
                    index = np.uint64(ranks[at]) + np.uint64(count_bits(positions[at] & below))
                    answer[rank] = np.int32(index)
                    packed += _ONE << (np.uint64(tier[index]) << np.uint64(4))
                else:
                    answer[rank] = -1
            phase = np.int64(is_prefill[request])
            for group in range(4):
                shift = np.uint64(16 * group)
                counted[phase, group] += np.int64((packed >> shift) & np.uint64(0xFFFF))
        token = end
