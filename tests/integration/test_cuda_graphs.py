"""What a CUDA graph would hold of a step, see ``graph_rules``.

Needs Triton's kernels, so ``tests/kernels/test_cuda_path_interpreted.py`` runs it.
"""

from contextlib import contextmanager

import pytest
from graph_rules import GraphRules

from .cuda_memory import CudaMemory
from .cuda_stand_ins import PLANE
from .kv_setup import Setup
from .kv_world import World

pytestmark = [
    pytest.mark.skipif(PLANE != "triton", reason="run by tests/kernels"),
    pytest.mark.usefixtures("flash_mla_operators"),
]


class Watch:
    """Guards the forward pass of every layer, and compares steps whose batches are alike."""

    def __init__(self, memory, monkeypatch):
        self.memory, self.monkeypatch = memory, monkeypatch
        self.seen = {}
        self.num_repeated = 0

    @contextmanager
    def __call__(self, number, metadata):
        rules, scratch = GraphRules(), self.memory.worker.scratch
        before = scratch.num_bytes
        with rules.launches(self.monkeypatch), rules:
            yield
        batch = number, metadata.num_actual_tokens, metadata.num_reqs
        if batch in self.seen:
            assert rules.calls == self.seen[batch], "the same batch takes another way"
            assert scratch.num_bytes == before, "memory is allocated in a step"
            self.num_repeated += 1
        self.seen[batch] = rules.calls


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "auto"])
def test_a_graph_can_hold_the_step(monkeypatch, cache_dtype):
    """With hits, misses, and rows of many requests; FlashMLA's stand-in is not looked into."""
    setup = Setup(
        num_blocks=50,
        num_pages=12,
        block_tokens=64,
        page_tokens={"fp8_ds_mla": 320, "auto": 576}[cache_dtype],
        num_groups=1,
        num_index_groups=1,
        base_units=1,
        top_k=24,
        staging_rows=512 * 24,  # of every batch
        num_drafts=1,
        residency="fixed",
        lag=1,
        seed=5,
    )
    world = World(setup)
    world.worker.memory = memory = CudaMemory(setup, monkeypatch, cache_dtype)
    memory.guard = watch = Watch(memory, monkeypatch)
    for num_new in (200, 150):
        world.add_request(0, 0, num_new, max_tokens=12)
    for _ in range(6):
        world.schedule()
    world.close()
    assert watch.num_repeated > 3
    assert memory.events["hits"]
    assert memory.events["fetches"]
