"""Laws 2, 3, 4, 5, 8 and 9 under random schedules, from vLLM's KVCacheManager to the rows."""

import random
from collections import Counter
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_dhisparse.runtime.tables import UNIT_ROWS

from .kv_setup import Setup
from .kv_world import World

IMPLEMENTATIONS = ["reference", "cpu"]
SEEDS = range(12)
NUM_EVENTS = 200
EVENTS = {
    # of the scheduler
    "hit tokens",
    "refused",
    "preempted",
    "resumed",
    "finished",
    "aborted in flight",
    "out of pages",
    "adopted",
    # of the worker
    "accepted",
    "rejected",
    "shared",
    "hits",
    "fetches",
    "entered the cache",
    "cache too small",
    "no cache",
    "more passes",
}

setups = st.builds(
    Setup,
    num_blocks=st.sampled_from([120, 160, 260]),
    num_pages=st.sampled_from([14, 24, 60]),
    block_tokens=st.just(UNIT_ROWS),
    page_tokens=st.sampled_from([64, 128]),
    num_groups=st.sampled_from([1, 3, 4]),
    num_indexer_groups=st.integers(1, 3),
    base_units=st.integers(0, 3),
    num_drafts=st.sampled_from([0, 3]),
    lag=st.integers(0, 2),
    caching=st.booleans(),
    residency=st.sampled_from(["adaptive", "fixed"]),
    indexer_first=st.booleans(),
    defers_frees=st.booleans(),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    num_index_groups=st.integers(1, 2),
    top_k=st.sampled_from([8, 96]),
    staging_rows=st.sampled_from([2048, 128]),
    seed=st.integers(0, 1000),
)


class Hierarchy(RuleBasedStateMachine):
    @initialize(setup=setups)
    def start(self, setup):
        self.world = World(setup)

    @rule(
        prefix=st.integers(0, 3),
        prefix_length=st.integers(0, 400),
        num_new=st.integers(1, 150),
        max_tokens=st.integers(1, 40),
    )
    def add_request(self, prefix, prefix_length, num_new, max_tokens):
        self.world.add_request(prefix, prefix_length, num_new, max_tokens)
        self.world.schedule()

    @rule(count=st.integers(1, 12))
    def schedule(self, count):
        for _ in range(count):
            self.world.schedule()
            self.world.check()

    @rule()
    def update(self):
        self.world.update()

    @rule(index=st.integers(0, 20))
    def abort(self, index):
        self.world.abort(index)

    @rule(index=st.integers(0, 7))
    def preempt(self, index):
        self.world.preempt_any(index)

    @rule()
    def reset_prefix_cache(self):
        self.world.reset_prefix_cache()

    @rule(base_units=st.integers(0, 3))
    def set_base_units(self, base_units):
        self.world.set_base_units(base_units)

    @rule(num_units=st.integers(0, 12), reserve=st.integers(0, 24))
    def adopt(self, num_units, reserve):
        self.world.adopt(num_units, reserve)

    @rule(num_units=st.integers(0, 6))
    def give_up(self, num_units):
        self.world.state.ledger.optional.give_up(num_units)

    @rule(num_units=st.integers(1, 6))
    def recycle(self, num_units):
        self.world.state.ledger.optional.recycle(num_units)

    @rule(reserve=st.integers(0, 40))
    def refill_reserve(self, reserve):
        self.world.state.ledger.optional.refill_reserve(reserve)

    @rule(seed=st.integers(0, 1000))
    def evict_prefixes(self, seed):
        self.world.evict_prefixes(seed)

    @invariant()
    def laws_hold(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()


TestHierarchy = Hierarchy.TestCase
TestHierarchy.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("defers_frees", [False, True])
def test_f32_a_flush_while_steps_are_in_flight(defers_frees):
    """It is refused while a request runs, and while blocks wait for a step in flight.

    Else it is in order: the commands of the flush follow those of the steps in flight, whose
    copies end before a worker applies them.
    """
    world = World(Setup(lag=2, block_tokens=UNIT_ROWS, defers_frees=defers_frees))
    for prefix in range(2):
        world.add_request(prefix, 400, 60, 20)
    for _ in range(6):
        world.schedule()
    assert len(world.in_flight) == 2
    before = world.trace()
    assert not world.kv.reset_prefix_cache()
    assert world.trace() == before, "a refused flush leaves a trace"
    while world.running:
        world.preempt(world.running[-1])
    assert bool(world.deferred) == defers_frees
    assert world.kv.reset_prefix_cache() != defers_frees
    world.reset_prefix_cache()
    assert bool(world.in_flight) != defers_frees, "the flush need not wait for the worker"
    for _ in range(12):
        world.schedule()
        world.check()
    assert world.events["resumed"] == 2
    world.close()


@cache
def run_seed(seed, implementation):
    """Drive a world for longer than hypothesis would; rare events come at their rates."""
    draw = random.Random(seed)
    world = World(
        Setup(
            num_blocks=draw.choice([120, 160, 260]),
            num_pages=[14, 24, 40][seed % 3],
            block_tokens=UNIT_ROWS,
            page_tokens=[64, 128][seed % 5 == 3],
            num_groups=[3, 1, 4][seed % 3],
            num_indexer_groups=[1, 3, 1, 2][seed % 4],
            base_units=[1, 0, 2, 1][seed % 4],
            num_drafts=[3, 0][seed % 5 == 4],
            lag=[1, 2, 0][seed % 3],
            caching=seed % 6 != 5,
            residency=["adaptive", "fixed"][seed % 2],
            indexer_first=bool(seed & 1),
            defers_frees=seed % 4 == 2,
            implementation=implementation,
            num_index_groups=1 + seed % 2,
            top_k=[8, 96][seed // 2 % 2],
            staging_rows=[2048, 128][seed % 4 == 1],
            seed=seed,
        )
    )
    rare = [
        lambda: world.abort(draw.randrange(20)),
        lambda: world.preempt_any(draw.randrange(8)),
        lambda: world.evict_prefixes(draw.randrange(1000)),
        lambda: world.state.ledger.optional.give_up(draw.randrange(1, 4)),
        world.update,
    ]
    if world.setup.residency == "adaptive":
        rare.append(lambda: world.set_base_units(draw.randrange(4)))
    for _ in range(NUM_EVENTS):
        event = draw.random()
        if event < 0.18 and len(world.waiting) < 6:
            prefix_length = 400 if draw.random() < 0.7 else draw.randrange(400)
            num_new, max_tokens = draw.randrange(1, 150), draw.randrange(1, 40)
            world.add_request(draw.randrange(4), prefix_length, num_new, max_tokens)
        elif event < 0.24:
            draw.choice(rare)()
        elif event < 0.243:
            world.reset_prefix_cache()
        else:
            world.schedule()
            if draw.random() < 0.4:
                world.adopt(draw.randrange(1, 6), draw.randrange(24))
            if draw.random() < 0.5:
                world.state.ledger.optional.refill_reserve(24)
        world.check()
    world.close()
    return world.reached()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_random_schedules(implementation, seed):
    assert run_seed(seed, implementation)["hits"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_schedules_reach_every_event(implementation):
    reached = sum((run_seed(seed, implementation) for seed in SEEDS), Counter())
    assert set(reached) == EVENTS
    assert min(reached.values()) > 20, reached
