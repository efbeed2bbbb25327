"""What checks and benchmarks share: sizes, pinned memory, a batch with a cache."""

from typing import Any, NamedTuple

import torch

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitState
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.plan import Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes

PAGE_ROWS = 320  # an indexer block of GLM-5.3
QUERIES = 8  # of a request: one token and seven drafts
OPS: Any = implementation("triton")


class Sizes(NamedTuple):
    """How large everything is; ``repeats``: of each timing; ``chunk_bytes``: of the pool."""

    top_k: int
    context: int
    requests: tuple[int, ...]
    gathered_rows: int
    pool_rows: int
    heads: tuple[int, ...]
    tokens: int
    steps: int
    repeats: int
    chunk_bytes: int


REAL = Sizes(2048, 32_000, (16, 128), 1 << 16, 1 << 20, (16, 128), 64, 40, 20, 256 << 20)
TINY = Sizes(24, 640, (2,), 64, 1280, (4,), 3, 2, 1, 200_000)


def pinner(device: str) -> Any:
    """Return what registers host memory with the device; None where it reads it anyway."""
    if device == "cpu":
        return None
    from vllm_dhisparse.runtime.cuda_pinner import CudaPinner

    return CudaPinner()


def make_pool(pages: int, row_size: int, dtype: torch.dtype, sizes: Sizes, device: str) -> HostPool:
    """Return a pinned pool of one layer in several chunks, with random bytes."""
    pool = HostPool(
        1,
        pages,
        PAGE_ROWS,
        row_size,
        dtype,
        pinner=pinner(device),
        device=device,
        max_chunk_bytes=sizes.chunk_bytes,
    )
    as_bytes = pool.layer(0).view(torch.uint8)
    block = torch.randint(0, 64, as_bytes.shape[1:], dtype=torch.uint8)
    for page in range(pages):
        as_bytes[page] = (block + page) % 64  # less than one in every format
    return pool


class Batch:
    """Decoding requests, their pages in random order, and selections that drift."""

    def __init__(self, requests: int, sizes: Sizes, device: str, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.sizes, self.requests, self.device = sizes, requests, device
        blocks = -(-sizes.context // PAGE_ROWS)
        pages, units = requests * blocks, requests * 2 * -(-sizes.top_k // UNIT_ROWS)
        tails = range(units, units + requests)  # one for each request
        total = pages + units + requests
        self.table_sizes = TableSizes(total, units + requests, pages, PAGE_ROWS, 1, 1)
        order = torch.randperm(pages, generator=self.random).tolist()
        bound = (PageBound(page, block) for block, page in enumerate(order))
        state = UnitState.OPTIONAL
        added = (UnitAdded(unit, state, (pages + unit,)) for unit in range(units))
        tail = (UnitAdded(unit, UnitState.TAIL, (pages + unit,)) for unit in tails)
        self.commands = StepCommands(0, (*bound, *added, *tail))
        self.first_tail_block = pages + units
        self.owner = torch.arange(requests, dtype=torch.int32).repeat_interleave(QUERIES)
        self.table = torch.arange(pages, dtype=torch.int32).view(requests, blocks)
        self.near = torch.randint(0, sizes.context, (requests, 3 * sizes.top_k // 2))

    def tables(self, ops: Any, device: str) -> Tables:
        """Return tables where the commands are applied."""
        tables = Tables(self.table_sizes, device)
        ops.apply(self.commands, tables)
        return tables

    def queries(self, device: str) -> Queries:
        """Who asks, in every step the same."""
        visible = torch.full_like(self.owner, self.sizes.context)
        is_prefill = torch.zeros(self.requests, dtype=torch.bool)
        return Queries(*(t.to(device) for t in (self.owner, visible, self.table, is_prefill)))

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots of the newest rows, in the address group and in the tails."""
        position = self.sizes.context - QUERIES + torch.arange(QUERIES)
        block = self.table[:, position // PAGE_ROWS].long()
        tail = self.first_tail_block + torch.arange(self.requests)[:, None]
        address = block * PAGE_ROWS + position % PAGE_ROWS
        return address.flatten(), (tail * UNIT_ROWS + position % UNIT_ROWS).flatten()

    def select(self) -> torch.Tensor:
        """Return the next step's selections on the host: mostly those of the step before."""
        top_k, shape = self.sizes.top_k, self.near.shape
        fresh = torch.rand(shape, generator=self.random) < 0.03
        drawn = torch.randint(0, self.sizes.context, shape, generator=self.random)
        self.near = torch.where(fresh, drawn, self.near)
        picked = torch.rand(len(self.owner), shape[1], generator=self.random)
        places = picked.topk(top_k, dim=1).indices
        return self.near[self.owner.long()].gather(1, places).int()

    def scratch(self) -> Scratch:
        """Return memory on the device."""
        return Scratch(self.device)
