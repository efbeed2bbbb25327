"""The worker's tables: which page, unit and slot everything is in.

All are allocated once and changed in place, so that captured graphs and metadata
builders may hold views of them. A slot is ``unit * UNIT_ROWS + offset``; a host row is
``page * page_rows + offset``.
"""

from typing import NamedTuple

import torch

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.core.commands import UNIT_ROWS as UNIT_ROWS
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.host_memory import advise_huge_pages

NO_SLOT = -1
NO_ROW = -1
NO_PAGE = -1
NO_BLOCK = -1
NO_UNIT = -1


class TableSizes(NamedTuple):
    """Sizes of all tables. ``page_rows`` is a multiple of ``UNIT_ROWS``."""

    num_blocks: int
    num_units: int
    num_pages: int
    page_rows: int
    latent_groups: int
    index_groups: int

    @property
    def host_rows(self) -> int:
        """Rows of the host pool in one layer."""
        return self.num_pages * self.page_rows

    @property
    def num_slots(self) -> int:
        """Slots of one index group when every unit is live."""
        return self.num_units * UNIT_ROWS


class GroupTables(NamedTuple):
    """Row cache of one index group; views into ``Tables``.

    ``slot_of_row``: [host_rows] int32, ``NO_SLOT`` = not on the device.
    ``row_of_slot``: [num_slots] int32, ``NO_ROW`` = empty; its inverse.
    ``age``: [num_slots] uint8, see ``core.clock``; 0 where empty.
    ``hand``: [1] int32, the slot where the next search for a victim starts.
    """

    slot_of_row: torch.Tensor
    row_of_slot: torch.Tensor
    age: torch.Tensor
    hand: torch.Tensor


class Tables:
    """All tables of one worker.

    Attributes:
        step: number of the last step whose commands were applied, -1 before the first.
        page_of_block: [num_blocks] int32 - host page of an indexer block.
        block_of_page: [num_pages] int32 - its inverse.
        unit_blocks: [num_units, latent_groups] int32 - blocks of a unit.
        unit_of_block: [num_blocks] int32 - its inverse.
        unit_state: [num_units] uint8 - ``UnitState``.
        errors: [1] int32 - what kernels found impossible, see ``kernels.errors``.
        slot_of_row, row_of_slot, age, hand: fields of ``GroupTables`` for all index
            groups, in the first dimension.

    """

    def __init__(self, sizes: TableSizes, device: torch.device | str = "cpu") -> None:
        if sizes.page_rows % UNIT_ROWS:
            raise ValueError(
                f"page_rows = {sizes.page_rows} tokens of an indexer block must be a multiple"
                f" of {UNIT_ROWS}"
            )
        for name, count in (("host rows", sizes.host_rows), ("slots", sizes.num_slots)):
            if count >= 2**31:
                raise ValueError(f"{count} {name} do not fit in int32; lower host_pool_gib")

        def table(*shape: int, value: int = -1, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if tensor.device.type == "cpu":
                advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
            return tensor.fill_(value)

        groups = sizes.index_groups
        self.sizes = sizes
        self.step = -1
        self.page_of_block = table(sizes.num_blocks)
        self.block_of_page = table(sizes.num_pages)
        self.unit_blocks = table(sizes.num_units, sizes.latent_groups)
        self.unit_of_block = table(sizes.num_blocks)
        self.unit_state = table(sizes.num_units, value=UnitState.DEAD, dtype=torch.uint8)
        self.errors = table(1, value=0)
        self.slot_of_row = table(groups, sizes.host_rows)
        self.row_of_slot = table(groups, sizes.num_slots)
        self.age = table(groups, sizes.num_slots, value=0, dtype=torch.uint8)
        self.hand = table(groups, 1, value=0)
        fields = (self.slot_of_row, self.row_of_slot, self.age, self.hand)
        self._groups = [GroupTables(*views) for views in zip(*fields, strict=True)]

    def group(self, index_group: int) -> GroupTables:
        """Views of one index group's tables."""
        return self._groups[index_group]

    def check_integrity(self) -> None:
        """Assert that every table agrees with its inverse and that only live units hold rows."""
        _check_inverse(self.page_of_block, self.block_of_page, "page_of_block", "block_of_page")
        live = self.unit_state != UnitState.DEAD
        assert (self.unit_state <= max(UnitState)).all(), "unknown unit state"
        assert (self.unit_blocks[live] >= 0).all(), "a live unit without a block"
        assert (self.unit_blocks[~live] == NO_BLOCK).all(), "a dead unit with a block"
        blocks = self.unit_blocks[live].flatten().long()
        assert (blocks.sort().values.diff() > 0).all(), "one block in two units"
        owners = live.nonzero().expand(-1, self.sizes.latent_groups).flatten()
        assert (self.unit_of_block[blocks] == owners).all(), "unit_of_block misses a unit"
        assert (self.unit_of_block >= 0).sum() == blocks.numel(), "unit_of_block of a dead unit"

        bound = (self.block_of_page >= 0).repeat_interleave(self.sizes.page_rows)
        live_slots = live.repeat_interleave(UNIT_ROWS)
        for index_group in range(self.sizes.index_groups):
            slot_of_row, row_of_slot, age, hand = self.group(index_group)
            _check_inverse(slot_of_row, row_of_slot, "slot_of_row", "row_of_slot")
            assert (row_of_slot[~live_slots] == NO_ROW).all(), "a row in a slot of a dead unit"
            assert (slot_of_row[~bound] == NO_SLOT).all(), "a row of an unbound page has a slot"
            assert (age <= MAX_AGE).all(), "age above its maximum"
            assert (age[row_of_slot == NO_ROW] == 0).all(), "an empty slot with an age"
            assert 0 <= int(hand) < max(1, self.sizes.num_slots), "hand outside the slots"


def _check_inverse(forward: torch.Tensor, inverse: torch.Tensor, name: str, other: str) -> None:
    keys = (forward >= 0).nonzero().flatten()
    assert (inverse[forward[keys].long()] == keys).all(), f"{other} does not undo {name}"
    assert keys.numel() == (inverse >= 0).sum(), f"{name} misses an entry of {other}"
