"""What Triton's kernels note of a step, against the probe that waits; in the interpreter only."""

import pytest
import torch
from planes import INTERPRETS, plane
from schedules import Schedule, Worker

from vllm_dhisparse.runtime.plan import Phase
from vllm_dhisparse.runtime.usage import UsageProbe

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="run by tests/kernels")


@pytest.mark.parametrize("staging_rows", [4096, 40], ids=["one pass", "more passes"])
def test_triton_counts_ages_as_the_probe_does(staging_rows):
    ops, schedule = plane("triton"), Schedule(3)
    worker = Worker("triton", schedule, staging_rows)
    resolve, seen = worker.ops.resolve, []

    class Watched:
        def __getattr__(self, name):
            return getattr(ops, name)

        def resolve(self, selected, queries, tables, index_group, *rest):
            before = torch.full_like(tables.group(index_group).age, 77)
            cached, hits = (torch.zeros(4, dtype=torch.int64) for _ in range(2))
            probe = UsageProbe(tables, index_group)
            ops.note_ages(tables, index_group, before, cached)
            found = resolve(selected, queries, tables, index_group, *rest)
            ops.count_hits(found, before, hits)
            usage = probe.take(selected, queries, found)
            assert tuple(cached.tolist()) == usage.cached_ages
            assert tuple(hits.tolist()) == usage.hit_ages
            seen.append(usage)
            return found

    worker.ops = Watched()
    for _ in range(8):
        worker.run(schedule.next())
    assert sum(sum(usage.hit_ages) for usage in seen)
    assert len([usage for usage in seen if sum(usage.cached_ages)]) > 2


@pytest.mark.parametrize(("generates", "phase"), [(True, Phase.GENERATION), (False, Phase.PREFILL)])
def test_triton_adds_a_use_to_the_phase_of_the_step(generates, phase):
    """The interpreter has no clock, so no time."""
    ops, totals = plane("triton"), torch.zeros(2, 2, dtype=torch.int64)
    started = torch.full((1,), 5)
    for _ in range(3):
        ops.start_clock(started)
        ops.stop_clock(started, torch.tensor([generates]), totals)
    expected = torch.zeros(2, 2, dtype=torch.int64)
    expected[phase, 1] = 3
    assert torch.equal(totals, expected)
