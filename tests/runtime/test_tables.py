import pytest
import torch

from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.runtime.tables import NO_ROW, NO_SLOT, UNIT_ROWS, Tables, TableSizes

SIZES = TableSizes(
    num_blocks=12, num_units=3, num_pages=4, page_rows=128, latent_groups=2, index_groups=2
)


def live_tables():
    tables = Tables(SIZES)
    tables.page_of_block[7], tables.block_of_page[2] = 2, 7
    tables.unit_blocks[1] = torch.tensor([3, 4])
    tables.unit_of_block[3:5] = 1
    tables.unit_state[1] = UnitState.REQUIRED
    tables.slot_of_row[0, 2 * 128 + 5], tables.row_of_slot[0, UNIT_ROWS] = UNIT_ROWS, 2 * 128 + 5
    return tables


def test_new_tables_are_empty_and_whole():
    tables = Tables(SIZES)
    assert (tables.slot_of_row == NO_SLOT).all()
    assert (tables.row_of_slot == NO_ROW).all()
    tables.check_integrity()
    live_tables().check_integrity()


def test_group_tables_are_views():
    tables = Tables(SIZES)
    tables.group(1).age[3] = 2
    assert tables.age[1, 3] == 2
    assert tables.group(0).hand.shape == (1,)


def spoil_inverse(tables):
    tables.slot_of_row[0, 2 * 128 + 6] = UNIT_ROWS


def spoil_dead_unit(tables):
    tables.unit_state[1] = UnitState.DEAD


def spoil_shared_block(tables):
    tables.unit_blocks[0], tables.unit_state[0] = torch.tensor([3, 6]), UnitState.TAIL


def spoil_unit_of_block(tables):
    tables.unit_of_block[9] = 1


def spoil_unbound_page(tables):
    tables.page_of_block[7], tables.block_of_page[2] = -1, -1


def spoil_age(tables):
    tables.age[1, 0] = 1


def spoil_hand(tables):
    tables.hand[0] = SIZES.num_slots


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_inverse,
        spoil_dead_unit,
        spoil_shared_block,
        spoil_unit_of_block,
        spoil_unbound_page,
        spoil_age,
        spoil_hand,
    ],
)
def test_check_integrity_finds(spoil):
    tables = live_tables()
    spoil(tables)
    with pytest.raises(AssertionError):
        tables.check_integrity()


def test_page_rows_must_hold_whole_units():
    with pytest.raises(ValueError, match="multiple of 64"):
        Tables(SIZES._replace(page_rows=96))


def test_more_rows_than_int32_can_name_are_refused():
    with pytest.raises(ValueError, match="host_pool_gib"):
        Tables(SIZES._replace(num_pages=2**25, page_rows=64))
