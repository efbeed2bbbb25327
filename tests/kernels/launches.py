"""Every launch that the product makes, at real shapes: recorded instead of run.

So what is compiled ahead of time cannot differ from what is shipped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from spans import slab_and_span
from triton.runtime.jit import JITFunction

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
from vllm_dhisparse.runtime import triton as plane
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.plan import Plan, Queries, Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes
from vllm_dhisparse.runtime.triton import resolution

TOP_K, TOKENS, PAGE_ROWS, PAGES = 2048, 16, 320, 40
ROW_FORMATS = {  # row size, dtype, rows of a padded block as a multiple of them
    "bfloat16": (576, torch.bfloat16),
    "fp8_ds_mla": (656, torch.uint8),
    "fp8": (576, torch.uint8),
    "odd": (1029, torch.uint8),
}
HEADS = (8, 16, 64, 128)  # of one rank
_TYPES = {torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.uint16: "u16"}
_TYPES |= {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Launch(NamedTuple):
    """A kernel as the launcher would specialise it; hashable."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    is_copy: bool

    @property
    def name(self) -> str:
        """Kernel, and the constants that tell its variants apart."""
        names = self.kernel.arg_names
        shown = {names[i]: value for i, value in self.constants if names[i].isupper()}
        shown.pop("UNIT_ROWS", None)
        values = ",".join(f"{key}={value}" for key, value in shown.items())
        return f"{self.kernel.fn.__name__}({values})"


def _launch(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    signature, constants, aligned = [], [], []
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        is_number = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_number and value == 1):
            kind = "constexpr"
            constants.append((index, value))
        elif isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        signature.append((parameter.name, kind))
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value
        is_special = kind not in ("constexpr", "fp32") and not parameter.do_not_specialize
        if is_special and address % 16 == 0:
            aligned.append(index)
    # Only rows of whole words can be read 16 bytes at a time.
    wide = "ALIGNMENT" in keywords and keywords["ALIGNMENT"] == 16
    is_copy = wide or kernel.fn.__name__ == "retrieve_decoded"
    options = tuple(sorted(values.items()))
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options, is_copy)


@contextmanager
def _recorded() -> Iterator[dict[Launch, None]]:
    launches: dict[Launch, None] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        assert all(size > 0 for size in grid), f"empty grid {grid} of {kernel.fn.__name__}"
        launches[_launch(kernel, args, keywords)] = None

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def shipped_launches() -> list[Launch]:
    """Drive every operation of the Triton data plane; nothing is computed."""
    with _recorded() as launches:
        tables = Tables(TableSizes(96, 16, PAGES, PAGE_ROWS, 4, 21))
        spans = _apply(tables)
        mapping = torch.zeros(TOKENS, dtype=torch.int64)
        plane.host_rows(mapping, tables)
        plane.enter(mapping, 2, mapping, tables, 3)
        plan = _resolve(tables)
        _measure(plan, tables)
        for size, dtype in ROW_FORMATS.values():
            _copy(plan, spans, tables, size, dtype)
        for heads in HEADS:
            _attend(plan, heads)
    return list(launches)


def _apply(tables: Tables) -> Any:
    return plane.apply(
        StepCommands(
            0,
            (
                PageBound(1, 2),
                PageDropped(1, 2),
                UnitAdded(3, UnitState.OPTIONAL, (3, 4, 5, 6)),
                UnitMoved(3, UnitState.REQUIRED),
                UnitLost(3),
                SpanRestored(4, 1, 64),
            ),
        ),
        tables,
    )


def _resolve(tables: Tables) -> Plan:
    selected = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    owner = torch.zeros(TOKENS, dtype=torch.int32)
    table = torch.zeros(2, PAGES, dtype=torch.int32)
    queries = Queries(owner, owner, table, torch.zeros(2, dtype=torch.bool))
    got = plane.resolve(selected, queries, tables, 0, 1 << 20, Scratch())
    original = resolution._Resolver._size_of
    resolution._Resolver._size_of = lambda *_: TOP_K + 16  # type: ignore[method-assign]
    try:  # unions larger than staging
        plane.resolve(selected, queries, tables, 0, TOP_K, Scratch())
    finally:
        resolution._Resolver._size_of = original  # type: ignore[method-assign]
    return got.plans[0]


def _measure(plan: Plan, tables: Tables) -> None:
    started, counts = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    before = torch.zeros(tables.sizes.num_slots, dtype=torch.uint8)
    plane.start_clock(started)
    plane.stop_clock(started, torch.zeros(1, dtype=torch.bool), counts.view(2, 2))
    plane.note_ages(tables, 3, before, counts)
    plane.count_hits(Resolution((plan,), counts, counts), before, counts)


def _copy(plan: Plan, spans: Any, tables: Tables, row_size: int, dtype: torch.dtype) -> None:
    capacity = plan.union.numel()
    host = HostLayer.of(torch.empty(PAGES, PAGE_ROWS, row_size, dtype=dtype))
    # fp8_ds_mla pages of GLM-5.3 are 256 bytes longer than their rows, others whole rows.
    block_bytes = (UNIT_ROWS + 2) * row_size * dtype.itemsize if row_size != 656 else 42_240
    slab, found = slab_and_span(8, row_size, dtype, block_bytes, capacity)
    column = tables.unit_blocks[:, 1]
    staging = torch.empty(capacity, row_size, dtype=dtype)
    plane.publish(staging[:TOKENS], torch.zeros(TOKENS, dtype=torch.int64), host)
    plane.restore(spans, 2, slab, column, host)
    plane.retrieve(plan, slab, column, host, staging)
    if row_size == 656:
        decoded = torch.empty(capacity, 576, dtype=torch.bfloat16)
        plane.retrieve(plan, slab, column, host, decoded)
    plane.retrieve_in_place(plan, found, slab, column, host, Scratch())


def _attend(plan: Plan, heads: int) -> None:
    query = torch.empty(TOKENS, heads, 576, dtype=torch.bfloat16)
    staging = torch.empty(64, 576, dtype=torch.bfloat16)
    slab = torch.empty(4, UNIT_ROWS + 2, 576, dtype=torch.bfloat16)[:, :UNIT_ROWS]
    plane.attend(query, staging[None], plan.remap, 0.1, 512)
    plane.attend(query, slab, plan.remap, 0.1, 512)
