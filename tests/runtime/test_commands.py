import pytest
import torch
from planes import IMPLEMENTATIONS, plane

from vllm_dhisparse.core.commands import (
    PageBound,
    PageDropped,
    SpanRestored,
    StepCommands,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes

SIZES = TableSizes(
    num_blocks=20, num_units=4, num_pages=6, page_rows=128, latent_groups=2, index_groups=2
)
ADDED = UnitAdded(2, UnitState.TAIL, (11, 7))
BOUND = PageBound(5, 3)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return plane(request.param)


def tables_after(ops, *commands):
    tables = Tables(SIZES)
    ops.apply(StepCommands(0, commands), tables)
    tables.check_integrity()
    return tables


def write(ops, tables, count):
    """Tokens at the start of block 3 and, in the two latent groups, of unit 2."""
    rows = ops.host_rows(3 * 128 + torch.arange(count), tables)
    for group, block in enumerate((11, 7)):
        ops.enter(block * UNIT_ROWS + torch.arange(count), group, rows, tables, group)
    tables.check_integrity()
    return rows


def test_commands_in_order(ops):
    tables = tables_after(
        ops, BOUND, PageDropped(5, 3), PageBound(5, 4), ADDED, UnitMoved(2, UnitState.OPTIONAL)
    )
    assert tables.page_of_block[4] == 5
    assert tables.page_of_block[3] == -1
    assert tables.unit_state[2] == UnitState.OPTIONAL
    assert tables.unit_of_block[[11, 7]].tolist() == [2, 2]


def test_rows_written_are_mapped_in_their_group(ops):
    tables = tables_after(ops, BOUND, ADDED)
    rows = write(ops, tables, 3)
    assert rows.tolist() == [640, 641, 642]
    assert tables.slot_of_row[:, 640:644].tolist() == [[128, 129, 130, -1]] * 2


@pytest.mark.parametrize(
    "command", [UnitLost(2), PageDropped(5, 3)], ids=lambda command: type(command).__name__
)
def test_a_lost_unit_or_page_leaves_no_entry_in_any_group(ops, command):
    tables = tables_after(ops, BOUND, ADDED)
    write(ops, tables, 60)
    tables.age[:, 130] = 3
    ops.apply(StepCommands(1, (command,)), tables)
    tables.check_integrity()
    assert (tables.slot_of_row == -1).all()
    assert (tables.row_of_slot == -1).all()


def test_f19_f20_a_row_written_again_replaces_the_rejected_one(ops):
    tables = tables_after(ops, BOUND, ADDED, PageBound(0, 8))
    write(ops, tables, 4)
    rewritten = ops.host_rows(torch.tensor([8 * 128]), tables)
    ops.enter(torch.tensor([11 * UNIT_ROWS + 2]), 0, rewritten, tables, 0)  # another row, its slot
    ops.enter(torch.tensor([7 * UNIT_ROWS + 9]), 1, torch.tensor([641]), tables, 1)  # its row moves
    tables.check_integrity()
    assert tables.slot_of_row[0, [642, 0]].tolist() == [-1, 130]
    assert tables.slot_of_row[1, 641] == 137
    assert tables.row_of_slot[1, 129] == -1


def test_f18_accepting_across_a_page_boundary(ops):
    tables = tables_after(ops, BOUND, PageBound(1, 8), ADDED)
    host = torch.zeros(6, 128, 1, dtype=torch.uint8)
    for first, rows in ((126, [1, 2, 3, 4]), (129, [5])):  # three of four are accepted
        position = torch.arange(first, first + len(rows))
        blocks = torch.tensor([3, 8])[position // 128]
        written = ops.host_rows(blocks * 128 + position % 128, tables)
        ops.publish(torch.tensor(rows, dtype=torch.uint8)[:, None], written, HostLayer.of(host))
        ops.enter(11 * UNIT_ROWS + position - 126, 0, written, tables, 0)
        tables.check_integrity()
    assert host[5, 126:, 0].tolist() == [1, 2]
    assert host[1, :2, 0].tolist() == [3, 5]
    assert tables.slot_of_row[0, [766, 767, 128, 129]].tolist() == [128, 129, 130, 131]


def test_written_rows_enter_fresh(ops):
    tables = tables_after(ops, BOUND, ADDED)
    write(ops, tables, 4)
    tables.age[:, 128:132] = 3
    write(ops, tables, 2)
    assert tables.age[0, 128:132].tolist() == [0, 0, 3, 3]


def test_a_restored_span_enters_where_it_has_no_slot_and_is_copied(ops):
    tables = tables_after(ops, BOUND, ADDED, PageBound(0, 8))
    write(ops, tables, 3)  # of page 5; they keep their slots
    states = UnitState.OPTIONAL
    commands = (
        UnitAdded(0, states, (9, 10)),
        UnitAdded(1, states, (12, 13)),
        UnitAdded(3, states, (14, 15)),
        SpanRestored(0, 5, 0),
        SpanRestored(1, 0, 64),
        SpanRestored(3, 0, 64),  # again: nothing is absent any more
        UnitLost(1),
        SpanRestored(3, 5, 64),
    )
    spans = ops.apply(StepCommands(1, commands), tables)
    tables.check_integrity()
    assert spans.units.tolist() == [0, 1, 3, 3]
    assert spans.first_host_rows.tolist() == [640, 64, 64, 704]
    assert spans.absent.sum(dim=(1, 2)).tolist() == [2 * 61, 2 * 64, 0, 2 * 64]
    assert tables.slot_of_row[1, 640:644].tolist() == [128, 129, 130, 3]
    assert (tables.slot_of_row[:, 64:128] == -1).all()
    pages = torch.arange(6 * 128 * 3, dtype=torch.int32).view(6, 128, 3)
    slab = torch.full((20, 66, 3), -1, dtype=torch.int32)
    expected = slab.clone()
    ops.restore(spans, 1, slab, tables.unit_blocks[:, 1], HostLayer.of(pages))
    expected[10, 3:64] = pages[5, 3:64]
    expected[15, :64] = pages[5, 64:]
    assert torch.equal(slab, expected)


@pytest.mark.parametrize(
    "commands",
    [
        (BOUND, ADDED, SpanRestored(2, 5, 0)),
        (UnitAdded(2, UnitState.OPTIONAL, (11, 7)), SpanRestored(2, 5, 0)),
        (BOUND, UnitAdded(2, UnitState.OPTIONAL, (11, 7)), *[SpanRestored(2, 5, 0)] * 2),
        (BOUND, PageBound(5, 4)),
        (BOUND, PageBound(4, 3)),
        (BOUND, PageDropped(4, 3)),
        (BOUND, PageDropped(5, 3), PageDropped(5, 3)),
        (PageDropped(5, 3),),
        (ADDED, ADDED),
        (ADDED, UnitAdded(1, UnitState.TAIL, (7, 9))),
        (UnitAdded(1, UnitState.TAIL, (7, 7)),),
        (UnitAdded(1, UnitState.DEAD, (7, 9)),),
        (UnitMoved(2, UnitState.OPTIONAL),),
        (ADDED, UnitMoved(2, UnitState.TAIL)),
        (ADDED, UnitMoved(2, UnitState.DEAD)),
        (UnitLost(2),),
        (ADDED, UnitLost(2), UnitLost(2)),
    ],
)
def test_f34_impossible_commands_are_refused(ops, commands):
    with pytest.raises(AssertionError):
        tables_after(ops, *commands)


@pytest.mark.parametrize("step", [1, 3, 0])
def test_a_step_is_applied_exactly_once_and_in_order(ops, step):
    tables = Tables(SIZES)
    with pytest.raises(AssertionError, match="applied after -1"):
        ops.apply(StepCommands(1), tables)
    for first in range(2):
        ops.apply(StepCommands(first), tables)
    with pytest.raises(AssertionError, match="applied after 1"):
        ops.apply(StepCommands(step), tables)
    ops.apply(StepCommands(2), tables)


def test_padding_is_neither_addressed_nor_entered(ops):
    tables = tables_after(ops, BOUND, ADDED)
    rows = ops.host_rows(torch.tensor([-1, 3 * 128 + 5, -1]), tables)
    assert rows.tolist() == [-1, 645, -1]
    ops.enter(torch.tensor([-1, 11 * 64, -1]), 0, rows, tables, 0)
    assert (tables.slot_of_row >= 0).sum() == 1
    assert ops.host_rows(torch.zeros(0, dtype=torch.long), tables).shape == (0,)


@pytest.mark.parametrize(
    ("mapping", "group", "message"),
    [
        (11 * 64, 1, "another group"),
        (13 * 64, 0, "outside all units"),
        (9 * 64, 0, "outside a tail"),
        (-1, 0, "padding"),
    ],
)
def test_rows_written_in_the_wrong_place_are_refused(ops, mapping, group, message):
    tables = tables_after(ops, BOUND, ADDED, UnitAdded(0, UnitState.OPTIONAL, (9, 10)))
    with pytest.raises(AssertionError, match=message):
        ops.enter(torch.tensor([mapping]), group, torch.tensor([640]), tables, 0)


def test_a_row_without_a_page_is_not_addressed(ops):
    with pytest.raises(AssertionError, match="host page"):
        ops.host_rows(torch.tensor([4 * 128]), tables_after(ops, BOUND))
