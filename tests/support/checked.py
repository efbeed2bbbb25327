"""A data plane that compares every row handed to `attend` with its host row, and poison."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from engine import kv_caches, running, scheduler
from vllm import LLM

from vllm_dhisparse.integration import connector, worker_state
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.ops import data_plane


class CheckedDataPlane:
    """The data plane ``name``, with a look at what `retrieve` returns."""

    def __init__(self, name: str) -> None:
        self._ops = data_plane(name)
        self.rows_compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def retrieve(self, plan, slab, unit_blocks, host, staging):
        staging.fill_(float("nan"))
        rows = self._ops.retrieve(plan, slab, unit_blocks, host, staging)
        expected = host.flatten(0, 1)[plan.union.long()]
        assert torch.equal(rows[0], expected), "a row differs from its home"
        assert not expected.isnan().any(), "a row was selected before it was written"
        self.rows_compared += plan.union.numel()
        return rows


@contextmanager
def checked(
    monkeypatch: Any, model: Any, *, data_plane_name: str = "cpu", **options: Any
) -> Iterator[LLM]:
    """A ``fixed`` engine with all memory poisoned and every row compared.

    Options that are settings of this package go there, all others to vLLM. At the end
    every block and page must be back and the scheduler's books must balance.
    """
    plane = CheckedDataPlane(data_plane_name)
    monkeypatch.setattr(connector, "data_plane", lambda _name: plane)
    monkeypatch.setattr(worker_state, "HostPool", partial(HostPool, poisoned=True))
    settings = {"residency": "fixed"}
    for name in ("fixed_rows_per_request", "host_pool_gib", "staging_rows"):
        if name in options:
            settings[name] = options.pop(name)
    with running(model, settings, **options) as llm:
        for cache in kv_caches(llm):
            cache.fill_(float("nan"))
        yield llm
        state = scheduler(llm).connector._scheduler_state
        state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={}))  # an idle step
        state.check_integrity()
        assert state.pages.num_held == 0
        assert state.ledger.levels()[1:] == (0, 0, 0)
        assert plane.rows_compared > 0
