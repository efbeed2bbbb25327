"""An engine in which every row is compared with its home, and stale memory is poison."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from engine import kv_caches, running, scheduler
from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.commands import PageBound, SpanRestored, StepCommands, UnitLost
from vllm_dhisparse.integration import worker_side, worker_state
from vllm_dhisparse.integration.worker_state import LayerPlace, WorkerState
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.tables import UNIT_ROWS

SETTINGS = {field.name for field in fields(DHiSparseConfig)}
apply_commands = WorkerState.apply


class CheckedDataPlane:
    """The data plane ``name``, with a look at what `retrieve` returns."""

    def __init__(self, name: str) -> None:
        self._ops = implementation(name)
        self.rows_compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def retrieve(self, plan, slab, unit_blocks, host, staging):
        staging.fill_(float("nan"))
        rows = self._ops.retrieve(plan, slab, unit_blocks, host, staging)
        expected = host.pages.flatten(0, 1)[plan.union.long()]
        assert torch.equal(rows[0], expected), "a row differs from its home"
        assert not expected.isnan().any(), "a row was selected before it was written"
        self.rows_compared += plan.union.numel()
        return rows


def apply_and_check(state: WorkerState, commands: StepCommands) -> None:
    """`WorkerState.apply`, where lost units and new pages are poison and restored rows right."""
    for command in commands.commands:
        if isinstance(command, UnitLost):
            for place, block in _blocks(state, command.unit):
                place.kv_cache[block].fill_(float("nan"))
        elif isinstance(command, PageBound):
            for place in state.places:
                place.host.pages[command.page].fill_(float("nan"))
    apply_commands(state, commands)
    for command in commands.commands:
        if isinstance(command, SpanRestored):
            for place, block in _blocks(state, command.unit):
                slots = slice(command.unit * UNIT_ROWS, (command.unit + 1) * UNIT_ROWS)
                rows = state.tables.row_of_slot[place.index_group, slots].long()
                home = place.host.pages.flatten(0, 1)[rows[rows >= 0]]
                assert not home.isnan().any(), "a span was restored before it was written"
                restored = place.kv_cache[block][:UNIT_ROWS][rows >= 0]
                assert torch.equal(restored, home), "a restored row differs from its home"


def _blocks(state: WorkerState, unit: int) -> list[tuple[LayerPlace, int]]:
    """The layers' places, each with the block of a live unit."""
    blocks = state.tables.unit_blocks[unit].tolist()
    places = [(place, blocks[place.latent_group]) for place in state.places]
    return [(place, block) for place, block in places if block >= 0]


@contextmanager
def checked(
    monkeypatch: Any, model: Any, *, data_plane_name: str = "cpu", **options: Any
) -> Iterator[LLM]:
    """A hierarchy engine, ``fixed`` by default, with poisoned memory and every row compared.

    Options that are settings of this package go there, all others to vLLM. At the end
    every block and page must be back and the books of scheduler and worker must balance.
    """
    plane = CheckedDataPlane(data_plane_name)
    monkeypatch.setattr(worker_side, "data_plane", lambda _name: plane)
    monkeypatch.setattr(worker_state, "HostPool", partial(HostPool, poisoned=True))
    monkeypatch.setattr(WorkerState, "apply", apply_and_check)
    settings = {"residency": "fixed"}
    settings |= {name: options.pop(name) for name in SETTINGS & set(options)}
    with running(model, settings, **options) as llm:
        for cache in kv_caches(llm):
            cache.fill_(float("nan"))
        yield llm
        state = scheduler(llm).connector.scheduler.state
        state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={}))  # an idle step
        state.check_integrity()
        assert state.pages.num_held == 0
        assert state.ledger.levels()[1:3] == (0, 0)
        get_kv_transfer_group().worker.state.tables.check_integrity()
        assert llm.reset_prefix_cache()
        assert state.ledger.levels()[1:] == (0, 0, 0), "a unit outlives a reset"
        assert state.pages.num_free == state.pages.num_pages, "a page outlives a reset"
        assert plane.rows_compared > 0
