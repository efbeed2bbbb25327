"""The controller with the real ledger on a small pool, under loads that come and go."""

from collections import deque
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from unit_losses import UnitLosses

from vllm_dhisparse.core.adaptation import AdaptiveResidency
from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.core.ledger import Ledger
from vllm_dhisparse.core.spans import MissingSpans
from vllm_dhisparse.simulator.pool import SimulatedPool

GROUPS, BASE_UNITS, TAIL_UNITS = 2, 2, 2
REQUIRED_BLOCKS = GROUPS * (BASE_UNITS + TAIL_UNITS)


class Engine:
    """Requests with equal prefix hits on one ledger; ``step`` is one scheduler iteration."""

    def __init__(self, num_blocks=200, max_running=100, cached=(), **controller):
        self.source = SimulatedPool(num_blocks)
        self.source.cached = set(cached)
        self.ledger = Ledger(self.source, GROUPS, BASE_UNITS, "adaptive", [])
        self.controller = ResidencyController(**controller)
        self.residency = AdaptiveResidency(
            self.controller, self.ledger, num_blocks, MissingSpans(), place_of=None
        )
        self.max_running = max_running
        self.running = {}  # id -> positions so far
        self.waiting = deque()
        self.num_requests = 0
        self.losses = UnitLosses()
        self.targets = []

    def step(self, arrivals=0, finish=None, grow=False, fetched_rows=500):
        if finish is not None and self.running:
            self.end(list(self.running)[finish % len(self.running)])
        for request_id in list(self.running):
            if grow:
                self.grow(request_id)
        for _ in range(arrivals):
            self.waiting.append(f"request-{self.num_requests}")
            self.num_requests += 1
        self.admit()
        self.control(fetched_rows)

    def grow(self, request_id):
        if self.source.num_free < GROUPS:
            self.end(request_id)
            return
        end = self.running[request_id]
        self.ledger.grow_tail(request_id, end, 1)
        self.ledger.absorb_tail(request_id, end + 1 - TAIL_UNITS)
        self.running[request_id] = end + 1

    def end(self, request_id):
        end = self.running.pop(request_id)
        blocks = [
            self.ledger.tail_block(request_id, position, group)
            for position in range(end - TAIL_UNITS, end)
            for group in range(GROUPS)
        ]
        self.ledger.end_request(request_id)
        self.source.release(blocks)

    def admit(self):
        while self.waiting and len(self.running) < self.max_running:
            if self.source.num_free < REQUIRED_BLOCKS:
                break
            request_id = self.waiting.popleft()
            self.ledger.claim_share(request_id, BASE_UNITS)
            self.ledger.grow_tail(request_id, BASE_UNITS, TAIL_UNITS)
            self.running[request_id] = BASE_UNITS + TAIL_UNITS

    def lost_units(self):
        """Optional units that went since the last call."""
        return self.losses.count(self.ledger.take_commands())

    def control(self, fetched_rows):
        is_short = self.waiting and len(self.running) < self.max_running
        free_blocks = self.source.num_free
        done = self.residency.adapt(
            waiting_blocks=REQUIRED_BLOCKS if is_short else 0,
            growth_blocks=GROUPS * len(self.running),
            fetched_rows=fetched_rows,
        )
        self.lost_units()
        assert self.source.num_free == free_blocks, "adopting took blocks from vLLM"
        self.targets.append(done.targets)
        self.ledger.check_integrity()


def turns(states):
    """Steps in which growth starts after pressure, and those in which pressure ends growth."""
    up, down, direction = [], [], None
    for step, state in enumerate(states):
        now = {"grow": "up", "hold": direction}.get(state, "down")
        if direction is not None and now != direction:
            (up if now == "up" else down).append(step)
        direction = now
    return up, down


steps_of_load = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 0, 1, 3]), st.integers(0, 9), st.booleans()),
    min_size=30,
    max_size=80,
)


@settings(max_examples=40, deadline=None)
@given(steps_of_load, st.integers(1, 12), st.integers(0, 30), st.integers(20, 200))
def test_any_load_keeps_to_the_rules(load, dwell_steps, head_reserve_blocks, num_blocks):
    engine = Engine(
        num_blocks,
        head_reserve_blocks=head_reserve_blocks,
        growth_horizon_steps=2,
        dwell_steps=dwell_steps,
        adopt_units_per_step=8,
    )
    for arrivals, finish, grow in load:
        engine.step(arrivals, finish if finish < 3 else None, grow)
        # Liveness: whoever waits does not fit even if all optional units went.
        assert not engine.waiting or engine.source.num_free < REQUIRED_BLOCKS
        levels = engine.ledger.levels()
        pinned = GROUPS * (levels.tail_units + levels.required_units)
        assert levels.free_blocks + pinned == num_blocks, "above budget"
        assert GROUPS * levels.optional_units <= levels.free_blocks
    states = [targets.state for targets in engine.targets]
    up, down = turns(states)
    for changes in (up, down):
        assert all(b - a >= dwell_steps for a, b in pairwise(changes))
    for start in up:
        calm = states[max(0, start - dwell_steps + 1) : start]
        assert not {"shrink", "reclaim"} & {*calm}


def settle(engine):
    for _ in range(60):
        engine.step()
    optional = engine.ledger.levels().optional_units
    for _ in range(10):
        engine.step()
    assert engine.ledger.levels().optional_units == optional > 0


def test_dwell_bounds_how_often_bursts_turn_growth():
    def restarts(dwell_steps):
        engine = Engine(head_reserve_blocks=0, growth_horizon_steps=0, dwell_steps=dwell_steps)
        for step in range(120):
            engine.step(arrivals=2 * (step % 6 == 0), finish=0 if step % 6 in (3, 4) else None)
        return len(turns([targets.state for targets in engine.targets])[0])

    assert restarts(dwell_steps=0) >= 10, "this load makes growth flap"
    assert restarts(dwell_steps=24) <= 120 // 24


def test_one_step_inside_the_head_reserve_loses_nothing():
    cached = range(160, 200)
    engine = Engine(cached=cached, head_reserve_blocks=REQUIRED_BLOCKS, growth_horizon_steps=0)
    settle(engine)
    optional = engine.ledger.levels().optional_units
    engine.waiting.append("one more")
    engine.admit()
    assert "one more" in engine.running
    # The share pins optional units, so the pool hands out the tail only.
    assert engine.lost_units() == 0
    assert engine.ledger.levels().optional_units == optional - BASE_UNITS
    assert engine.source.cached == set(cached)


def test_growth_inside_the_horizon_loses_nothing():
    engine = Engine(head_reserve_blocks=0, growth_horizon_steps=4, low_watermark_ratio=0.0)
    engine.step(arrivals=3)
    settle(engine)
    for _ in range(4):
        for request_id in engine.running:
            engine.grow(request_id)
        assert engine.lost_units() == 0


def test_growth_ends_where_only_cached_prefixes_are_left():
    engine = Engine(cached=range(100, 200), head_reserve_blocks=8, dwell_steps=10)
    settle(engine)
    assert not any(targets.adopt_units for targets in engine.targets[60:])
    assert {targets.state for targets in engine.targets} == {"grow", "hold"}, "that is no pressure"
    assert engine.source.cached == set(range(100, 200))


def test_pressure_takes_all_units_in_the_step_that_needs_them():
    engine = Engine(head_reserve_blocks=8)
    settle(engine)
    engine.step(arrivals=200 // REQUIRED_BLOCKS)
    assert not engine.waiting
    assert engine.ledger.levels().optional_units == 0
    assert engine.targets[-1].state == "reclaim"


def test_growth_returns_after_the_load_is_gone():
    engine = Engine(head_reserve_blocks=8, dwell_steps=16)
    settle(engine)
    before = engine.ledger.levels().optional_units
    engine.step(arrivals=25)
    while engine.running:
        engine.step(finish=0)
    for _ in range(60):
        engine.step()
    assert engine.ledger.levels().optional_units >= before
