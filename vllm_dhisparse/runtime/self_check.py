"""A data plane proves itself on a small case with a known answer."""

import sys

import torch

from vllm_dhisparse.core.commands import (
    UNIT_ROWS,
    Command,
    PageBound,
    StepCommands,
    UnitAdded,
    UnitLost,
    UnitState,
)
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.ops import DataPlane, ImplementationName, implementation
from vllm_dhisparse.runtime.plan import Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import Tables, TableSizes

_ROW_SIZE, _TOP_K, _TOKENS = 8, 16, 100
_PAGE_ROWS = 2 * UNIT_ROWS
_SIZES = TableSizes(
    num_blocks=8, num_units=4, num_pages=2, page_rows=_PAGE_ROWS, latent_groups=1, index_groups=1
)


def self_check(ops: DataPlane) -> None:
    """Write the rows of one request, drop a unit of them, and read them back.

    Raises:
        RuntimeError: a row or an attention output is not what was written.

    """
    rows = torch.arange(_TOKENS * _ROW_SIZE, dtype=torch.float32).view(_TOKENS, _ROW_SIZE) / 999
    slab = torch.full((_SIZES.num_blocks, UNIT_ROWS, _ROW_SIZE), torch.nan)
    host = HostLayer.of(torch.full((_SIZES.num_pages, _PAGE_ROWS, _ROW_SIZE), torch.nan))
    tables, scratch = Tables(_SIZES), Scratch()
    _write(ops, tables, rows, slab, host)
    added = UnitAdded(2, UnitState.REQUIRED, (5,))
    ops.apply(StepCommands(1, (UnitLost(0), added)), tables)
    selected = torch.arange(_TOP_K, dtype=torch.int32).mul(6).flip(0)[None]
    queries = Queries(
        torch.zeros(1, dtype=torch.int32),
        torch.full((1,), _TOKENS, dtype=torch.int32),
        torch.tensor([[7]], dtype=torch.int32),
        torch.zeros(1, dtype=torch.bool),
    )
    expected = rows[selected[0].long()]
    query = torch.linspace(-1, 1, 2 * _ROW_SIZE).view(1, 2, _ROW_SIZE)
    answer = torch.softmax(query[0] @ expected.T, -1) @ expected[:, :4]
    for attempt in ("from the host", "from the cache"):
        (plan,) = ops.resolve(selected, queries, tables, 0, 2 * _TOP_K, scratch).plans
        staging = torch.full((2 * _TOP_K, _ROW_SIZE), torch.nan)
        found = ops.retrieve(plan, slab, tables.unit_blocks[:, 0], host, staging)
        remap = plan.remap.long()
        if not torch.equal(found[0][remap[0]], expected):
            raise RuntimeError(f"rows read {attempt} are not the rows that were written")
        output = ops.attend(query, found, plan.remap, 1.0, 4)
        if not torch.allclose(output[0], answer, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"attention over rows read {attempt} is wrong")


def _write(
    ops: DataPlane, tables: Tables, rows: torch.Tensor, slab: torch.Tensor, host: HostLayer
) -> None:
    """Do what a model's layer does in its step: units 0 and 1 are the request's tail."""
    blocks = (3, 4)
    tails: tuple[Command, ...] = tuple(
        UnitAdded(unit, UnitState.TAIL, (block,)) for unit, block in enumerate(blocks)
    )
    ops.apply(StepCommands(0, (PageBound(1, 7), *tails)), tables)
    positions = torch.arange(len(rows))
    latent = torch.tensor(blocks)[positions // UNIT_ROWS] * UNIT_ROWS + positions % UNIT_ROWS
    slab.view(-1, _ROW_SIZE)[latent] = rows
    host_rows = ops.host_rows(7 * _PAGE_ROWS + positions, tables)
    ops.publish(rows, host_rows, host)
    ops.enter(latent, 0, host_rows, tables, 0)


def main(name: ImplementationName) -> None:
    """Check one implementation and say so."""
    self_check(implementation(name))
    print(f"data plane {name}: rows and attention are exact")


if __name__ == "__main__":
    main(sys.argv[1])  # type: ignore[arg-type]
