import numpy as np
import pytest
from clock_state import Clock
from hypothesis import given
from hypothesis import strategies as st

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.core.working_set import Usage, working_set_rows


def usage(hit_ages, cached_ages, fetched_rows=0):
    return Usage(tuple(hit_ages), tuple(cached_ages), fetched_rows, ())


@pytest.mark.parametrize(
    ("hit_ages", "rows"),
    [
        ((0, 0, 0, 500), 40),  # nobody has read the older ones for a turn and more
        ((0, 5, 0, 495), 40),  # a hundredth of the hits may be lost, and not more
        ((0, 6, 0, 494), 20 + 30 + 40),
        ((200, 100, 100, 100), 10 + 20 + 30 + 40),
        ((0, 0, 0, 0), 0),
    ],
)
def test_rows_count_that_get_more_than_a_hundredth_of_the_hits(hit_ages, rows):
    cached = (10, 20, 30, 40)
    assert working_set_rows(usage(hit_ages, cached)) == rows
    assert working_set_rows(usage(hit_ages, cached, fetched_rows=7)) == rows + 7


ages = st.tuples(*[st.integers(0, 1000)] * (MAX_AGE + 1))


@given(ages, ages, st.integers(0, 100))
def test_the_estimate_lies_between_what_was_missed_and_all_there_is(hits, cached, fetched):
    assert fetched <= working_set_rows(usage(hits, cached, fetched)) <= sum(cached) + fetched


@pytest.mark.parametrize("used_rows", [40, 100, 250])
def test_a_clock_that_turns_shows_the_rows_in_use(used_rows):
    """Random reads of some rows, beside a scan that keeps the hand moving."""
    rng, clock = np.random.default_rng(0), Clock(400)
    row_of_slot = np.full(400, -1)
    next_scanned, estimates = 10_000, []
    for step in range(600):
        read = rng.choice(used_rows, size=used_rows // 4, replace=False)
        rows = np.concatenate([read, next_scanned + np.arange(12)])
        next_scanned += 12
        slots = {row: slot for slot, row in enumerate(row_of_slot) if row >= 0}
        hit = np.array([slots[row] for row in rows if row in slots], dtype=np.int64)
        missing = np.array([row for row in rows if row not in slots])
        seen = usage(
            np.bincount(clock.age[hit], minlength=MAX_AGE + 1),
            np.bincount(clock.age[row_of_slot >= 0], minlength=MAX_AGE + 1),
            len(missing),
        )
        if step >= 300:
            estimates.append(working_set_rows(seen))
        is_free = np.ones(400, dtype=bool)
        is_free[hit] = False
        empty = row_of_slot < 0
        taken = clock.take(empty, ~empty & is_free, len(missing))
        row_of_slot[taken] = missing
        clock.hit(hit)
    assert 0.9 * used_rows <= np.mean(estimates) <= 1.5 * used_rows + 24
