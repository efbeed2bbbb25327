"""Union of selections by a bitmap over host rows; no sort, no hash.

Selections of one request are collected in a bitmap over its positions, which fits in
the first-level cache, and moved to the bitmap over host rows one page at a time; a page
is whole words of 64 rows.
"""

import numpy as np

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, lowest_bit, prefetch
from vllm_dhisparse.runtime.cpu.state import IN_USE, Asked, Cache, Found, Int32s, Kept, Words

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)
_WORD_SHIFT = np.uint64(6)
_HIT = IN_USE | np.uint8(MAX_AGE)
_AHEAD = 192  # rows between the prefetch of a map entry and its use


@compiled
def has(bitmap: Words, row: int) -> bool:
    """Whether a row is in a bitmap."""
    return bool((bitmap[row >> 6] >> (np.uint64(row) & _LOW_BITS)) & _ONE)


@compiled
def run_of_request(asked: Asked, token: int, last: int) -> tuple[int, int, int]:
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

    False when a selected position has no host page. ``positions`` is scratch.
    """
    token = first
    while token < last:
        request, end, words = run_of_request(asked, token, last)
        if words > positions.size:
            return False
        positions[:words] = 0
        for row in range(token, end if words else token):
            limit, selected = np.uint64(max(asked.visible[row], 0)), asked.selected[row]
            for rank in range(selected.size):
                position = np.uint64(np.uint32(selected[rank]))
                if position < limit:
                    positions[position >> _WORD_SHIFT] |= _ONE << (position & _LOW_BITS)
        if words:
            if not _move_home(asked, request, positions[:words], union):
                return False
            if not (kept.all or asked.is_prefill[request]):
                _move_home(asked, request, positions[:words], kept.rows)
        token = end
    return True


@compiled
def _move_home(asked: Asked, request: int, positions: Words, bitmap: Words) -> bool:
    """Set the bits of a request's positions in a bitmap over host rows."""
    blocks, page_of_block = asked.block_table[request], asked.page_of_block
    page_words, words = np.uint64(asked.page_rows >> 6), np.uint64(positions.size)
    word, block = np.uint64(0), np.uint64(0)
    while word < words:
        page = page_of_block[blocks[block]]
        place, end = np.uint64(max(page, 0)) * page_words, min(word + page_words, words)
        block += _ONE
        missing = np.uint64(0)
        while word < end:
            missing |= positions[word]
            bitmap[place] |= positions[word]
            word += _ONE
            place += _ONE
        if page < 0 and missing:
            return False
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
def look_up(found: Found, kept: Kept, cache: Cache, missing: Int32s) -> tuple[int, int]:
    """Find slot and tier of each row, and which rows are at home only.

    Ages of the slots found get ``IN_USE``, those of kept rows the age of a hit too.
    Returns how many rows are missing and kept, and how many are missing and not;
    ``missing`` gets the indices of the first.
    """
    rows, slot_of_rank, tier, fetch = found
    slot_of_row, unit_state, age = cache.slot_of_row, cache.unit_state, cache.age
    map_address, kept_rows, all_kept = cache.slot_of_row_address, kept.rows, kept.all
    number, others = 0, 0
    for rank in range(rows.size):
        if rank + _AHEAD < rows.size:
            prefetch(map_address + 4 * np.int64(rows[rank + _AHEAD]))
        row = rows[rank]
        slot = slot_of_row[row]
        wanted = all_kept or has(kept_rows, row)
        slot_of_rank[rank] = slot
        fetch[rank] = slot < 0
        if slot < 0:
            tier[rank] = 0
            missing[number] = rank
            number += wanted
            others += not wanted
        else:
            tier[rank] = unit_state[slot >> 6]
            age[slot] |= _HIT if wanted else IN_USE
    return number, others
