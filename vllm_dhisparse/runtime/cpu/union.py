"""Union of selections by a bitmap over host rows; no sort, no hash.

Selections of one request are collected in a bitmap over its positions, which fits in
the first-level cache, and moved to the bitmap over host rows one page at a time; a page
is whole words of 64 rows.
"""

import numpy as np

from vllm_dhisparse.runtime.cpu.native import compiled, count_bits, lowest_bit, prefetch
from vllm_dhisparse.runtime.cpu.state import Asked, Bitmaps, Int32s, Kept, Words

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(63)
_WORD_SHIFT = np.uint64(6)
_PAGES_AHEAD = np.uint64(16)  # pages between the prefetch of their words and its use


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
def mark(asked: Asked, first: int, last: int, bitmaps: Bitmaps, kept: Kept) -> int:
    """Fill the union with all rows that tokens ``first .. last`` select; return its size.

    Also those kept, if they are not all. -1 when a selected position has no host page.
    """
    union, _, positions, _ = bitmaps
    token = first
    union[:] = 0
    if not kept.all:
        kept.rows[:] = 0
    while token < last:
        request, end, words = run_of_request(asked, token, last)
        if words > positions.size:
            return -1
        positions[:words] = 0
        for row in range(token, end if words else token):
            limit, selected = np.uint64(max(asked.visible[row], 0)), asked.selected[row]
            for rank in range(selected.size):
                position = np.uint64(np.uint32(selected[rank]))
                if position < limit:
                    positions[position >> _WORD_SHIFT] |= _ONE << (position & _LOW_BITS)
        if not _move_home(asked, request, positions[:words], union):
            return -1
        if not (kept.all or asked.is_prefill[max(request, 0)]):
            _move_home(asked, request, positions[:words], kept.rows)
        token = end
    total = 0
    for word in range(union.size):
        total += count_bits(union[word])
    return total


@compiled
def _move_home(asked: Asked, request: int, positions: Words, bitmap: Words) -> bool:
    """Set the bits of a request's positions in a bitmap over host rows."""
    blocks, page_of_block = asked.block_table[max(request, 0)], asked.page_of_block
    page_words, words = np.uint64(asked.page_rows >> 6), np.uint64(positions.size)
    address = bitmap.ctypes.data
    word, block = np.uint64(0), np.uint64(0)
    while word < words:
        if word + _PAGES_AHEAD * page_words < words:
            ahead = np.int64(page_of_block[blocks[block + _PAGES_AHEAD]]) * asked.page_rows >> 6
            prefetch(address + 8 * ahead)
        page, all_bits = page_of_block[blocks[block]], np.uint64(0)
        place, end = np.uint64(max(page, 0)) * page_words, min(word + page_words, words)
        while word < end:
            all_bits |= positions[word]
            bitmap[place] |= positions[word]
            word += _ONE
            place += _ONE
        if page < 0 and all_bits:
            return False
        block += _ONE
    return True


@compiled
def list_rows(union: Words, rows: Int32s, rank_of_word: Int32s) -> None:
    """Write the rows of a bitmap in order, and the rank of the first row of each word.

    ``rows`` has room for ``SPARE_ROWS`` more than there are.
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
