"""Implementations of the data plane, with ``triton`` where the interpreter runs it."""

import os
from typing import Any

import torch

from vllm_dhisparse.runtime.ops import DataPlane, implementation
from vllm_dhisparse.runtime.plan import Plan

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
IMPLEMENTATIONS = ["reference", "cpu", *(["triton"] if INTERPRETS else [])]
_PADDING = 3


class Exact:
    """Triton's answers in the form of the others.

    What a kernel notes in the error word is raised at once, plans have no padding, and the
    operations that take a plan get one with padding, which must not be read.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def apply(self, commands: Any, tables: Any) -> Any:
        return self._checked(tables, self._ops.apply(commands, tables))

    def host_rows(self, slot_mapping: Any, tables: Any) -> Any:
        return self._checked(tables, self._ops.host_rows(slot_mapping, tables))

    def enter(self, slots: Any, group: int, rows: Any, tables: Any, index_group: int) -> None:
        self._checked(tables, self._ops.enter(slots, group, rows, tables, index_group))

    def resolve(self, selected: Any, queries: Any, tables: Any, *others: Any) -> Any:
        got = self._checked(tables, self._ops.resolve(selected, queries, tables, *others))
        return got._replace(plans=tuple(map(unpadded, got.plans)))

    def retrieve(self, plan: Plan, slab: Any, unit_blocks: Any, host: Any, staging: Any) -> Any:
        asked = padded(plan, len(staging))
        return self._ops.retrieve(asked, slab, unit_blocks, host, staging)[:, : len(plan.union)]

    def retrieve_in_place(self, plan: Plan, span: Any, *rest: Any) -> torch.Tensor:
        asked = padded(plan, span.staging[..., 0].numel())
        return self._ops.retrieve_in_place(asked, span, *rest)

    def _checked(self, tables: Any, result: Any) -> Any:
        self._ops.raise_errors(tables)
        return result


def use_large_tiles(monkeypatch: Any) -> None:
    """For tables of a size that the interpreter would need minutes for."""
    if INTERPRETS:
        from vllm_dhisparse.kernels import shapes

        monkeypatch.setattr(shapes, "TILE", 1 << 18)


def unpadded(plan: Plan) -> Plan:
    size = int((plan.union >= 0).sum())
    assert (plan.union[size:] == -1).all()
    return plan._replace(union=plan.union[:size], slot=plan.slot[:size], fetch=plan.fetch[:size])


def padded(plan: Plan, capacity: int) -> Plan:
    """The plan with some places that hold no row, where all else is nonsense."""
    count = min(_PADDING, capacity - len(plan.union))
    extra = torch.full((count,), -1, dtype=torch.int32, device=plan.union.device)
    return plan._replace(
        union=torch.cat([plan.union, extra]),
        slot=torch.cat([plan.slot, extra + 1]),
        fetch=torch.cat([plan.fetch, extra < 0]),
    )


def plane(name: Any) -> DataPlane | Exact:
    """The implementation of this name, for tests that compare answers."""
    return Exact(implementation(name)) if name == "triton" else implementation(name)
