"""Whole spans of history back into units: contiguous copies, outside any step's plan."""

from typing import NamedTuple

import torch

from vllm_dhisparse.core.clock import FRESH_AGE
from vllm_dhisparse.runtime.tables import NO_SLOT, UNIT_ROWS, Tables


class RestoredSpans(NamedTuple):
    """Rows that the map now places in units, and that every layer has to copy there.

    ``units``: [n] int32 - where; ``first_host_rows``: [n] int32 - of ``UNIT_ROWS``
    consecutive ones; ``absent``: [n, index_groups, UNIT_ROWS] bool - rows that had no slot in
    the index group.
    """

    units: torch.Tensor
    first_host_rows: torch.Tensor
    absent: torch.Tensor


def enter_span(unit: int, first_host_row: int, tables: Tables) -> torch.Tensor:
    """Enter the rows of a span that have no slot in the map, at their place in an empty unit.

    Returns which rows those are: [index_groups, UNIT_ROWS] bool.
    """
    slots = slice(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)
    rows = slice(first_host_row, first_host_row + UNIT_ROWS)
    assert (tables.row_of_slot[:, slots] < 0).all(), "a span is restored into a unit with rows"
    absent = tables.slot_of_row[:, rows] == NO_SLOT
    offsets = torch.arange(UNIT_ROWS, dtype=torch.int32).expand(absent.shape)
    tables.slot_of_row[:, rows][absent] = (unit * UNIT_ROWS + offsets)[absent]
    tables.row_of_slot[:, slots][absent] = (first_host_row + offsets)[absent]
    tables.age[:, slots] = FRESH_AGE
    return absent


def copy_spans(
    spans: RestoredSpans,
    index_group: int,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Copy the rows of spans in one layer, on the host. See ``ops.DataPlane.restore``."""
    page_rows = pages.shape[1]
    for unit, row, absent in zip(*(part.tolist() for part in spans[:2]), spans.absent, strict=True):
        block = int(unit_blocks[unit])
        if block < 0:  # the unit was lost again in the same step
            continue
        page, first = divmod(row, page_rows)
        mask = absent[index_group]
        slab[block, :UNIT_ROWS][mask] = pages[page, first : first + UNIT_ROWS][mask]
