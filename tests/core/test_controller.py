import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dhisparse.core.controller import (
    Decision,
    History,
    Pressure,
    ResidencyController,
    Targets,
)

IDLE = Pressure(
    total_blocks=1000,
    free_blocks=600,
    blocks_per_unit=2,
    tail_units=20,
    required_units=30,
    optional_units=100,
    lost_units=0,
    waiting_blocks=0,
    growth_blocks=10,
    fetched_rows=512,
    restorable_units=0,
)


def make_controller(**settings):
    known = {"head_reserve_blocks": 64, "growth_horizon_steps": 4, "dwell_steps": 8}
    return ResidencyController(**{**known, **settings})


def reconcile(controller=None, history=History(), **seen):  # noqa: B008 - an immutable default
    return (controller or make_controller()).reconcile(IDLE._replace(**seen), history)


def test_spare_memory_is_what_nothing_else_will_use():
    controller = make_controller()
    assert controller.adoptable_blocks(IDLE) == 600 - 2 * 100 - 64 - 4 * 10
    assert controller.adoptable_blocks(IDLE._replace(waiting_blocks=70)) == 600 - 200 - 64 - 70
    assert controller.adoptable_blocks(IDLE._replace(optional_units=300)) == -104


def test_growth_is_bounded_by_what_is_missed():
    first = reconcile(fetched_rows=500)
    assert first == Decision(Targets(7, 0, "grow"), History(True, 0, 500 - 7 * 64))
    second = reconcile(history=first.history, fetched_rows=12)
    assert second == Decision(Targets(1, 0, "grow"), History(True, 0, 0))
    assert reconcile(history=second.history, fetched_rows=0).targets == Targets(0, 0, "hold")


def test_growth_is_bounded_in_each_step():
    decision = reconcile(fetched_rows=100_000)
    assert decision == Decision(Targets(32, 0, "grow"), History(True, 0, 63))


def test_growth_starts_above_the_high_and_ends_at_the_low_watermark():
    reserve = 2 * 100 + 64 + 40
    high, low = reserve + 30, reserve + 10
    growing = History(is_growing=True)
    assert reconcile(free_blocks=high).targets.state == "hold"
    assert reconcile(free_blocks=high + 1).targets == Targets(8, 0, "grow")
    assert reconcile(history=growing, free_blocks=high).targets.adopt_units == 8
    assert reconcile(history=growing, free_blocks=low + 5).targets.adopt_units == 2
    assert reconcile(history=growing, free_blocks=low) == Decision(Targets(0, 0, "hold"), History())


def test_nothing_is_adopted_while_a_request_waits():
    assert reconcile(waiting_blocks=1).targets == Targets(0, 0, "hold")


def test_the_growth_reserve_is_not_adopted():
    assert reconcile(growth_blocks=0, free_blocks=400).targets.adopt_units == 8
    assert reconcile(growth_blocks=30, free_blocks=400).targets.adopt_units == 0


def test_the_head_reserve_is_not_adopted():
    assert reconcile(free_blocks=340).targets.adopt_units == 8
    larger = make_controller(head_reserve_blocks=80)
    assert reconcile(larger, free_blocks=340).targets.adopt_units == 0


def test_optional_units_in_the_reserves_are_shrinking():
    decision = reconcile(free_blocks=200)
    assert decision == Decision(Targets(0, 0, "shrink"), History(False, 8))


def test_a_full_pool_without_optional_units_has_nothing_to_shrink():
    decision = reconcile(free_blocks=10, optional_units=0)
    assert decision == Decision(Targets(0, 0, "hold"), History(False, 8))


def test_growth_waits_after_pressure_for_the_dwell_time():
    decision = reconcile(lost_units=1)
    assert decision == Decision(Targets(0, 0, "reclaim"), History(False, 8))
    states = []
    for _ in range(9):
        decision = reconcile(history=decision.history)
        states.append(decision.targets.state)
    assert states == ["hold"] * 7 + ["grow"] * 2


def test_cached_prefixes_may_be_the_growth_reserve_and_are_never_adopted():
    controller, spare = make_controller(), 600 - 2 * 100 - 64 - 4 * 10
    for cached, adoptable in ((0, spare), (40, spare), (41, spare - 1), (400, 600 - 400 - 264)):
        assert controller.adoptable_blocks(IDLE._replace(cached_blocks=cached)) == adoptable
    # Where nothing else is left, that is no pressure.
    decision = reconcile(history=History(is_growing=True), cached_blocks=400)
    assert decision == Decision(Targets(0, 0, "hold"), History())


def test_pressure_stops_growth_at_once():
    decision = reconcile(history=History(is_growing=True), lost_units=1)
    assert decision.targets == Targets(0, 0, "reclaim")


def test_restoring_has_what_misses_leave_of_the_link():
    controller = make_controller(restore_rows_per_step=640)
    seen = {"restorable_units": 50, "controller": controller}
    assert reconcile(fetched_rows=0, **seen).targets == Targets(10, 10, "grow")
    assert reconcile(fetched_rows=130, **seen).targets == Targets(2 + 7, 7, "grow")
    assert reconcile(fetched_rows=640, **seen).targets == Targets(10, 0, "grow")


def test_restoring_stays_inside_adoption():
    controller = make_controller(adopt_units_per_step=4)
    seen = {"restorable_units": 50, "fetched_rows": 0}
    assert reconcile(controller, **seen).targets == Targets(4, 4, "grow")
    assert reconcile(restorable_units=3, fetched_rows=0).targets == Targets(3, 3, "grow")
    assert reconcile(free_blocks=304, **seen).targets.restore_units == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("head_reserve_blocks", -1),
        ("growth_horizon_steps", 1.5),
        ("dwell_steps", True),
        ("low_watermark_ratio", 1.1),
        ("high_watermark_ratio", float("nan")),
        ("adopt_units_per_step", "8"),
        ("restore_rows_per_step", None),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=f"^{setting} must be"):
        make_controller(**{setting: value})


def test_watermarks_that_cross_are_refused():
    with pytest.raises(ValueError, match="low_watermark_ratio must not be above high"):
        make_controller(low_watermark_ratio=0.5)


MAX_DWELL_STEPS = 20


@st.composite
def pressures(draw):
    total = draw(st.integers(1, 4000))
    free = draw(st.integers(0, total))
    per_unit = draw(st.integers(1, 21))
    small = st.integers(0, 400)
    return Pressure(
        total_blocks=total,
        free_blocks=free,
        blocks_per_unit=per_unit,
        tail_units=draw(small),
        required_units=draw(small),
        optional_units=(optional := draw(st.integers(0, free // per_unit))),
        lost_units=draw(st.sampled_from([0, 0, 0, 5])),
        waiting_blocks=draw(st.sampled_from([0, 0, 40])),
        growth_blocks=draw(st.integers(0, 50)),
        fetched_rows=draw(st.integers(0, 5000)),
        restorable_units=draw(small),
        cached_blocks=draw(st.integers(0, free - optional * per_unit)),
    )


controllers = st.builds(
    ResidencyController,
    head_reserve_blocks=st.integers(0, 200),
    growth_horizon_steps=st.integers(0, 8),
    dwell_steps=st.integers(0, MAX_DWELL_STEPS),
    low_watermark_ratio=st.floats(0, 0.2),
    high_watermark_ratio=st.floats(0.2, 0.5),
    adopt_units_per_step=st.integers(0, 64),
    restore_rows_per_step=st.integers(0, 5000),
)
histories = st.builds(History, st.booleans(), st.integers(0, MAX_DWELL_STEPS), st.integers(0, 63))


@settings(max_examples=150, deadline=None)
@given(controllers, pressures(), histories)
def test_adoption_stays_inside_spare_memory(controller, seen, history):
    targets = controller.reconcile(seen, history).targets
    assert 0 <= targets.restore_units <= targets.adopt_units <= controller.adopt_units_per_step
    blocks = targets.adopt_units * seen.blocks_per_unit
    assert blocks <= max(0, controller.adoptable_blocks(seen))
    assert (targets.adopt_units > 0) == (targets.state == "grow")


@settings(max_examples=150, deadline=None)
@given(controllers, pressures(), histories)
def test_reconcile_is_pure(controller, seen, history):
    assert controller.reconcile(seen, history) == controller.reconcile(seen, history)


@settings(max_examples=150, deadline=None)
@given(controllers, pressures(), histories, st.integers(0, 500))
def test_more_free_blocks_never_mean_less_growth(controller, seen, history, more):
    roomier = seen._replace(free_blocks=min(seen.free_blocks + more, seen.total_blocks))
    before = controller.reconcile(seen, history).targets
    after = controller.reconcile(roomier, history).targets
    assert after.adopt_units >= before.adopt_units
    assert after.restore_units >= before.restore_units


@settings(max_examples=150, deadline=None)
@given(controllers, pressures(), histories)
def test_a_settled_state_stays(controller, seen, history):
    # At less than a unit a step the last rows of it come after all 5000.
    seen = seen._replace(lost_units=0, fetched_rows=64 * seen.fetched_rows)
    decision = None
    for _ in range(5000):
        before, decision = decision, controller.reconcile(seen, history)
        adopts, history = decision.targets.adopt_units, decision.history
        seen = seen._replace(optional_units=seen.optional_units + adopts)
        if decision == before and not adopts:
            break
    assert controller.reconcile(seen, history) == decision


def test_spans_are_restored_over_what_ended_requests_left():
    full = {"free_blocks": 500, "optional_units": 240, "fetched_rows": 0, "restorable_units": 9}
    assert reconcile(**full).targets == Targets(0, 0, "shrink")
    assert reconcile(**full, ended_units=100).targets == Targets(9, 9, "grow")


def test_misses_replace_rows_of_ended_units_without_growth():
    full = {"free_blocks": 500, "optional_units": 240, "ended_units": 240}
    assert reconcile(**full).targets == Targets(0, 0, "hold")
    assert reconcile(**full | {"ended_units": 150, "free_blocks": 700}).targets.adopt_units == 8
