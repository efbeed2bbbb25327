"""Many steps of the real data plane against the replacement that policies are compared with."""

import numpy as np
import pytest
import torch
from planes import plane

from vllm_dhisparse.core.commands import PageBound, StepCommands, UnitAdded, UnitState
from vllm_dhisparse.runtime.plan import Phase, Queries
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables, TableSizes
from vllm_dhisparse.simulator.locality import EASY, HARD, ORDINARY, positions
from vllm_dhisparse.simulator.replacement import clock_misses
from vllm_dhisparse.simulator.workloads import workload

CONTEXT, STEPS, TOP_K, UNITS = 960, 120, 24, 6
PAGES = 1 + (CONTEXT + STEPS) // UNIT_ROWS  # of one request
PROMPT_QUERIES = 200


@pytest.fixture(scope="module")
def load():
    kinds = enumerate((EASY, ORDINARY, HARD))
    return workload(
        [
            (CONTEXT, positions(kind, CONTEXT, STEPS, TOP_K, np.random.default_rng(number)))
            for number, kind in kinds
        ]
    )


def generation_fetches(name, load, scan_steps=()):
    """Rows fetched for the decoding requests in each step; beside them, one is in prefill."""
    requests = load.rows.shape[1] + 1
    pages = PAGES * requests
    ops, scratch = plane(name), Scratch()
    tables = Tables(TableSizes(pages + UNITS, UNITS, pages, UNIT_ROWS, 1, 1))
    bound = [PageBound(page, page) for page in range(pages)]
    added = [UnitAdded(unit, UnitState.REQUIRED, (pages + unit,)) for unit in range(UNITS)]
    ops.apply(StepCommands(0, (*bound, *added)), tables)
    table = torch.arange(pages, dtype=torch.int32).reshape(requests, PAGES)
    is_prefill = torch.arange(requests) == requests - 1
    fetched = []
    for step, rows in enumerate(load.rows):
        chosen = np.where(rows >= 0, rows - load.first_row[:, None], -1)
        owner = np.arange(requests - 1)
        if step in scan_steps:
            prompt = np.arange(PROMPT_QUERIES * TOP_K).reshape(-1, TOP_K) % CONTEXT
            chosen = np.concatenate([chosen, prompt])
            owner = np.concatenate([owner, np.full(PROMPT_QUERIES, requests - 1)])
        queries = Queries(
            torch.tensor(owner, dtype=torch.int32),
            torch.full((len(owner),), CONTEXT + step, dtype=torch.int32),
            table,
            is_prefill,
        )
        selected = torch.tensor(chosen, dtype=torch.int32)
        result = ops.resolve(selected, queries, tables, 0, 4096, scratch)
        fetched.append(int(result.fetched[Phase.GENERATION]))
    tables.check_integrity()
    return fetched


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_data_plane_replaces_as_the_compared_clock(name, load):
    assert UNIT_ROWS == UNIT_ROWS
    assert generation_fetches(name, load) == clock_misses(load, UNITS * UNIT_ROWS).sum(1).tolist()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_prompt_larger_than_the_cache_leaves_the_hit_rate_as_it_was(name, load):
    calm = generation_fetches(name, load)
    assert generation_fetches(name, load, scan_steps=range(50, 60)) == calm
