"""Whole spans of history back into units: contiguous copies, outside any step's plan."""

from typing import NamedTuple

import torch

from vllm_dhisparse.core.clock import FRESH_AGE
from vllm_dhisparse.runtime.tables import NO_SLOT, UNIT_ROWS, Tables


class RestoredSpan(NamedTuple):
    """Rows that the map now places in a unit, and that every layer has to copy there.

    ``unit``: where; ``first_host_row``: of ``UNIT_ROWS`` consecutive ones; ``absent``:
    [index_groups, UNIT_ROWS] bool - rows that had no slot in the index group.
    """

    unit: int
    first_host_row: int
    absent: torch.Tensor

    def copy(self, index_group: int, block: torch.Tensor, host: torch.Tensor) -> None:
        """Copy the rows in one layer.

        Args:
            index_group: of the layer.
            block: [>= UNIT_ROWS, row_size] - the unit's block, changed in place.
            host: [num_pages, page_rows, row_size] - the layer's host pages.

        """
        page, first = divmod(self.first_host_row, host.shape[1])
        absent = self.absent[index_group]
        block[:UNIT_ROWS][absent] = host[page, first : first + UNIT_ROWS][absent]


def enter_span(unit: int, first_host_row: int, tables: Tables) -> RestoredSpan:
    """Enter the rows of a span that have no slot in the map, at their place in an empty unit."""
    slots = slice(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)
    rows = slice(first_host_row, first_host_row + UNIT_ROWS)
    assert (tables.row_of_slot[:, slots] < 0).all(), "a span is restored into a unit with rows"
    absent = tables.slot_of_row[:, rows] == NO_SLOT
    offsets = torch.arange(UNIT_ROWS, dtype=torch.int32).expand(absent.shape)
    tables.slot_of_row[:, rows][absent] = (unit * UNIT_ROWS + offsets)[absent]
    tables.row_of_slot[:, slots][absent] = (first_host_row + offsets)[absent]
    tables.age[:, slots] = FRESH_AGE
    return RestoredSpan(unit, first_host_row, absent)
