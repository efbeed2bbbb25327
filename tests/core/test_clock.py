import numpy as np
from clock_state import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE, sweep


def sweep_one_by_one(age, hand, empty, replaceable, wanted):
    """CLOCK as it is told: one hand, one slot at a time."""
    num_slots, age, taken = len(age), age.copy(), []
    for slot in [(hand + step) % num_slots for step in range(num_slots)]:
        if empty[slot] and len(taken) < wanted:
            taken.append(slot)
    wanted = min(wanted, len(taken) + int(replaceable.sum()))
    left = replaceable.copy()
    while len(taken) < wanted:
        if left[hand] and age[hand] > 0:
            age[hand] -= 1
        elif left[hand]:
            taken.append(hand)
            left[hand] = False
        hand = (hand + 1) % num_slots
    age[taken] = FRESH_AGE
    return taken, age, hand


@st.composite
def states(draw):
    num_slots = draw(st.integers(1, 40))
    kinds = np.array(draw(st.lists(st.integers(0, 2), min_size=num_slots, max_size=num_slots)))
    ages = draw(st.lists(st.integers(0, MAX_AGE), min_size=num_slots, max_size=num_slots))
    hand = draw(st.integers(0, num_slots - 1))
    wanted = draw(st.integers(0, num_slots + 3))
    return np.array(ages, dtype=np.uint8), hand, kinds == 0, kinds == 1, wanted


@settings(max_examples=400, deadline=None)
@given(states())
def test_closed_form_is_the_plain_loop(state):
    before = state[0].copy()
    got = sweep(*state)
    taken, age, hand = sweep_one_by_one(*state)
    assert got.taken.tolist() == taken
    assert got.age.tolist() == age.tolist()
    assert got.hand == hand
    assert np.array_equal(state[0], before)


def everything_replaceable(ages, hand, wanted):
    age = np.array(ages, dtype=np.uint8)
    full = np.zeros(age.size, dtype=bool)
    return sweep(age, hand, full, ~full, wanted)


def test_slots_that_the_hand_did_not_reach_keep_their_age():
    got = everything_replaceable([1, 0, 3, 0, 3], 0, 1)
    assert got.taken.tolist() == [1]
    assert got.age.tolist() == [0, 0, 3, 0, 3]
    assert got.hand == 2


def test_a_row_used_again_outlives_rows_used_once():
    got = everything_replaceable([3, 0, 3, 0], 0, 2)
    assert got.taken.tolist() == [1, 3]


def test_all_slots_are_taken_in_the_order_of_their_age():
    got = everything_replaceable([3, 1, 2, 0], 1, 9)
    assert got.taken.tolist() == [3, 1, 2, 0]
    assert got.hand == 1


def test_empty_slots_go_first_and_leave_the_hand_alone():
    empty = np.array([True, False, False, True])
    got = sweep(np.zeros(4, dtype=np.uint8), 2, empty, ~empty, 2)
    assert got.taken.tolist() == [3, 0]
    assert got.hand == 2


def test_no_slots():
    none = np.zeros(0, dtype=bool)
    got = sweep(np.zeros(0, dtype=np.uint8), 0, none, none, 5)
    assert got.taken.size == 0
    assert got.hand == 0


def test_a_scan_does_not_push_out_rows_in_use():
    clock, full = Clock(8), np.zeros(8, dtype=bool)
    in_use = np.array([0, 1, 2])
    for _ in range(20):  # every step hits three rows and fetches five that never come back
        clock.hit(in_use)
        replaceable = ~full
        replaceable[in_use] = False
        taken = clock.take(full, replaceable, 5)
        assert not np.isin(taken, in_use).any()
        clock.enter(taken)
        clock.check_integrity()
    assert clock.take(full, ~full, 5).tolist() == [3, 4, 5, 6, 7]
