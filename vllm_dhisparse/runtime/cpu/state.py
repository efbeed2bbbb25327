"""What the resolve kernels read and change, as arrays."""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dhisparse.runtime.plan import Queries
from vllm_dhisparse.runtime.tables import Tables

Words: TypeAlias = NDArray[np.uint64]
Int32s: TypeAlias = NDArray[np.int32]
Bytes: TypeAlias = NDArray[np.uint8]

IN_USE = np.uint8(0x80)
"""Set in the age of a slot that the step reads, during the step."""

SPARE_ROWS = 4
"""What a listing may write beyond the last row."""


class Asked(NamedTuple):
    """Selections of the step, and what turns positions into host rows; see ``Queries``."""

    selected: Int32s
    request_of_token: Int32s
    visible: Int32s
    block_table: Int32s
    is_prefill: Bytes
    page_of_block: Int32s
    page_rows: int


class Cache(NamedTuple):
    """Row cache of one index group; see ``GroupTables``."""

    slot_of_row: Int32s
    slot_of_row_address: int
    row_of_slot: Int32s
    age: Bytes
    hand: Int32s
    unit_state: Bytes


class Found(NamedTuple):
    """Rows of a union, ascending, and what is known about each; see ``Plan``.

    ``rows`` has room for ``SPARE_ROWS`` more.
    """

    rows: Int32s
    slot: Int32s
    tier: Bytes
    fetch: Bytes


class Bitmaps(NamedTuple):
    """Union of the step, and the same in the order of one request's positions.

    ``union`` has a word for 64 host rows and ``rank_of_word`` counts the rows before each;
    ``position_words`` and ``position_ranks`` are scratch of the longest request.
    """

    union: Words
    rank_of_word: Int32s
    position_words: Words
    position_ranks: Int32s


class Kept(NamedTuple):
    """Rows that a request selects which is not in prefill; no bitmap needed if that is all."""

    rows: Words
    all: bool


def asked_of(selected: torch.Tensor, queries: Queries, tables: Tables) -> Asked:
    """View a step's selections as arrays."""
    return Asked(
        selected.numpy(),
        queries.request_of_token.numpy(),
        queries.visible.numpy(),
        queries.block_table.numpy(),
        queries.is_prefill.view(torch.uint8).numpy(),
        tables.page_of_block.numpy(),
        tables.sizes.page_rows,
    )


def cache_of(tables: Tables, index_group: int) -> Cache:
    """View an index group's tables as arrays."""
    slot_of_row, row_of_slot, age, hand = tables.group(index_group)
    return Cache(
        slot_of_row.numpy(),
        slot_of_row.data_ptr(),
        row_of_slot.numpy(),
        age.numpy(),
        hand.numpy(),
        tables.unit_state.numpy(),
    )
