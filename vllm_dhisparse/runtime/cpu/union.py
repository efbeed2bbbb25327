"""Union of selections by a bitmap over host rows; no sort, no hash.

Selections of one request are collected in a bitmap over its positions, which fits in
the first-level cache, and moved to the bitmap over host rows one word of 64 rows at a
time; a word lies in one page, because pages hold a multiple of 64 rows.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, lowest_bit, prefetch
from vllm_dhisparse.runtime.cpu.state import IN_USE, Asked, Cache, Found, Int32s, Kept, Words

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)
_WORD_SHIFT = np.uint64(6)
_MAX_AGE = np.uint8(MAX_AGE)
_AHEAD = 192  # rows between the prefetch of a map entry and its use


@compiled
def has(bitmap: Words, row: int) -> bool:
    """Whether a row is in a bitmap."""
    return bool((bitmap[row >> 6] >> (np.uint64(row) & _LOW_BITS)) & _ONE)


@compiled
def _run_of_request(asked: Asked, token: int, last: int) -> tuple[int, int, int]:
    """Return the request at ``token``, where its tokens end, and words of its positions."""
    request = asked.request_of_token[token]
    end, words = token, 0
    while end < last and asked.request_of_token[end] == request:
        words = max(words, (asked.visible[end] + 63) >> 6)
        end += 1
    return request, end, words if request >= 0 else 0


@compiled
def mark(asked: Asked, first: int, last: int, positions: Words, union: Words, kept: Kept) -> bool:
    """Set the bits of all rows that tokens ``first .. last`` select, and of those kept.

    False when a selected position has no host page.
    """
    token, page_words = first, asked.page_rows >> 6
    while token < last:
        request, end, words = _run_of_request(asked, token, last)
        if words > positions.size:
            return False
        positions[:words] = 0
        for row in range(token, end if words else token):
            limit, selected = np.uint64(max(asked.visible[row], 0)), asked.selected[row]
            for rank in range(selected.size):
                position = np.uint64(np.uint32(selected[rank]))
                if position < limit:
                    positions[position >> _WORD_SHIFT] |= _ONE << (position & _LOW_BITS)
        homeless, block, place, left, page = np.uint64(0), 0, 0, 0, 0
        for word in range(words):
            if left == 0:
                page = asked.page_of_block[asked.block_table[request, block]]
                place, left, block = max(page, 0) * page_words, page_words, block + 1
            bits = positions[word]
            homeless |= bits if page < 0 else np.uint64(0)
            union[place] |= bits
            if not (kept.all or asked.is_prefill[request]):
                kept.rows[place] |= bits
            place, left = place + 1, left - 1
        if homeless:
            return False
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
def look_up(found: Found, kept: Kept, cache: Cache) -> None:
    """Find slot and tier of each row, and which rows are at home only.

    Ages of the slots found get ``IN_USE``, those of kept rows the age of a hit too.
    """
    rows, slot, tier, fetch = found
    slot_of_row, unit_state, age = cache.slot_of_row, cache.unit_state, cache.age
    for rank in range(rows.size):
        if rank + _AHEAD < rows.size:
            prefetch(cache.slot_of_row_address + 4 * rows[rank + _AHEAD])
        row = rows[rank]
        place = slot_of_row[row]
        slot[rank] = place
        fetch[rank] = place < 0
        if place < 0:
            tier[rank] = 0
        else:
            tier[rank] = unit_state[place >> 6]
            if kept.all or has(kept.rows, row):
                age[place] = IN_USE | _MAX_AGE
            else:
                age[place] |= IN_USE


@compiled
def remap(
    asked: Asked,
    first: int,
    last: int,
    union: Words,
    rank_of_word: Int32s,
    found: Found,
    positions: Words,
    ranks: Int32s,
    out: Int32s,
    counted: NDArray[np.int64],
) -> None:
    """Turn positions into ranks in the union, and count selections by tier.

    ``positions`` and ``ranks`` are scratch: the union and its ranks, by position.
    """
    token, page_words, tier = first, asked.page_rows >> 6, found.tier
    while token < last:
        request, end, words = _run_of_request(asked, token, last)
        block, place, left = 0, 0, 0
        for word in range(words):
            if left == 0:
                page = asked.page_of_block[asked.block_table[request, block]]
                place, left, block = max(page, 0) * page_words, page_words, block + 1
            positions[word] = union[place]
            ranks[word] = rank_of_word[place]
            place, left = place + 1, left - 1
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
