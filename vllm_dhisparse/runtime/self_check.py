"""A data plane proves itself on a small case with a known answer."""

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
from vllm_dhisparse.runtime.ops import DataPlane, data_plane
from vllm_dhisparse.runtime.plan import Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import Tables, TableSizes

_ROW_SIZE, _TOP_K, _TOKENS = 8, 16, 100
_PAGE_ROWS = 2 * UNIT_ROWS
_SIZES = TableSizes(
    num_blocks=8, num_units=4, num_pages=2, page_rows=_PAGE_ROWS, latent_groups=1, index_groups=1
)


def self_check(
    ops: DataPlane, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Write the rows of one request, drop a unit of them, and read them back.

    Args:
        ops: the data plane.
        device: that it runs on.
        dtype: of rows; Triton's attention takes bfloat16 only.

    Raises:
        RuntimeError: a row or an attention output is not what was written.

    """
    rows = torch.arange(_TOKENS * _ROW_SIZE, dtype=torch.float32).view(_TOKENS, _ROW_SIZE) / 999
    rows = rows.to(device, dtype)
    slab = torch.full((_SIZES.num_blocks, UNIT_ROWS, _ROW_SIZE), torch.nan).to(device, dtype)
    host = _host_layer(torch.device(device), dtype)
    tables, scratch = Tables(_SIZES, device), Scratch(device)
    _write(ops, tables, rows, slab, host)
    added = UnitAdded(2, UnitState.REQUIRED, (5,))
    ops.apply(StepCommands(1, (UnitLost(0), added)), tables)
    selected = torch.arange(_TOP_K, dtype=torch.int32).mul(6).flip(0)[None].to(device)
    queries = Queries(
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((1,), _TOKENS, dtype=torch.int32, device=device),
        torch.tensor([[7]], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.bool, device=device),
    )
    expected = rows[selected[0].long()]
    query = torch.linspace(-1, 1, 2 * _ROW_SIZE).view(1, 2, _ROW_SIZE).to(device, dtype)
    values = expected.float()
    answer = torch.softmax(query[0].float() @ values.T, -1) @ values[:, :4]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for attempt in ("from the host", "from the cache"):
        (plan,) = ops.resolve(selected, queries, tables, 0, 2 * _TOP_K, scratch).plans
        staging = torch.full((2 * _TOP_K, _ROW_SIZE), torch.nan).to(device, dtype)
        found = ops.retrieve(plan, slab, tables.unit_blocks[:, 0], host, staging)
        remap = plan.remap.long()
        if not torch.equal(found[0][remap[0]], expected):
            raise RuntimeError(f"rows read {attempt} are not the rows that were written")
        output = ops.attend(query, found, plan.remap, 1.0, 4)
        if not torch.allclose(output[0].float(), answer, rtol=tolerance, atol=tolerance / 10):
            raise RuntimeError(f"attention over rows read {attempt} is wrong")


def _host_layer(device: torch.device, dtype: torch.dtype) -> HostLayer:
    pages = torch.full((_SIZES.num_pages, _PAGE_ROWS, _ROW_SIZE), torch.nan).to(dtype)
    if device.type == "cpu":
        return HostLayer.of(pages)
    pages = pages.pin_memory()
    addresses = torch.tensor([pages.data_ptr()], device=device)
    return HostLayer.of(pages)._replace(chunk_addresses=addresses)


def _write(
    ops: DataPlane, tables: Tables, rows: torch.Tensor, slab: torch.Tensor, host: HostLayer
) -> None:
    """Do what a model's layer does in its step: units 0 and 1 are the request's tail."""
    blocks = (3, 4)
    tails: tuple[Command, ...] = tuple(
        UnitAdded(unit, UnitState.TAIL, (block,)) for unit, block in enumerate(blocks)
    )
    ops.apply(StepCommands(0, (PageBound(1, 7), *tails)), tables)
    positions = torch.arange(len(rows), device=rows.device)
    latent = (
        torch.tensor(blocks, device=rows.device)[positions // UNIT_ROWS] * UNIT_ROWS
        + positions % UNIT_ROWS
    )
    slab.view(-1, _ROW_SIZE)[latent] = rows
    host_rows = ops.host_rows(7 * _PAGE_ROWS + positions, tables)
    ops.publish(rows, host_rows, host)
    ops.enter(latent, 0, host_rows, tables, 0)


def main() -> None:
    """Check the implementation of this machine's device, as that runs it, and say so."""
    if torch.cuda.is_available():
        name, device, dtype = "triton", "cuda", torch.bfloat16
    else:
        name, device, dtype = "cpu", "cpu", torch.float32
    self_check(data_plane(device), device, dtype)
    print(f"data plane {name}: rows and attention are exact")


if __name__ == "__main__":
    main()
