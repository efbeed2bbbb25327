import torch

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitState
from vllm_dhisparse.core.working_set import Usage
from vllm_dhisparse.runtime.ops import data_plane
from vllm_dhisparse.runtime.plan import Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes
from vllm_dhisparse.runtime.usage import UsageProbe, union_rows

SIZES = TableSizes(
    num_blocks=20, num_units=3, num_pages=4, page_rows=64, latent_groups=1, index_groups=2
)
OPS = data_plane("cpu")


def queries(request, prefill=(False, False)):
    return Queries(
        torch.tensor(request, dtype=torch.int32),
        torch.full((len(request),), 128, dtype=torch.int32),
        torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        torch.tensor(prefill),
    )


def step(tables, selected, request, staging=512):
    selected, asked = torch.tensor(selected, dtype=torch.int32), queries(request)
    probe = UsageProbe(tables, 1)
    resolution = OPS.resolve(selected, asked, tables, 1, staging, Scratch())
    return probe.take(selected, asked, resolution)


def test_a_probe_sees_the_ages_before_the_step():
    tables = Tables(SIZES)
    pages = [PageBound(block, block) for block in range(1, 4)]
    units = [UnitAdded(0, UnitState.REQUIRED, (10,)), UnitAdded(1, UnitState.TAIL, (11,))]
    OPS.apply(StepCommands(0, (*pages, *units)), tables)
    written = torch.arange(2)  # of the second request, in its tail
    OPS.enter(11 * UNIT_ROWS + written, 0, 3 * UNIT_ROWS + written, tables, 1)

    assert step(tables, [[0, 1, 2]], [0]) == Usage((0,) * 4, (0,) * 4, 3, (3,))
    assert step(tables, [[1, 2, 3]], [0]) == Usage((2, 0, 0, 0), (3, 0, 0, 0), 1, (3,))
    found_in_tail = step(tables, [[2, 3, 4], [0, 1, -1]], [0, 1])
    assert found_in_tail == Usage((1, 0, 0, 1), (2, 0, 0, 2), 1, (3, 2))


def test_rows_that_more_passes_read_are_counted_once():
    tables = Tables(SIZES)
    pages = [PageBound(block, block) for block in range(1, 4)]
    OPS.apply(StepCommands(0, (*pages, UnitAdded(0, UnitState.REQUIRED, (10,)))), tables)
    step(tables, [[0, 1, 2]], [0])
    used = step(tables, [[0, 1, 5], [1, 2, 5]], [0, 0], staging=3)
    assert used == Usage((3, 0, 0, 0), (3, 0, 0, 0), 1, (4,))


def test_the_union_of_a_request_leaves_out_prefill_and_padding():
    selected = torch.tensor([[5, 9, 9], [9, 7, -1], [130, 1, 2], [1, 2, 3]], dtype=torch.int32)
    assert union_rows(selected, queries([0, 0, 1, -1])) == (3, 2)
    assert union_rows(selected, queries([0, 0, 1, -1], prefill=(True, False))) == (2,)
