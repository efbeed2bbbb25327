"""Against vLLM's own coordinator for sparse attention, on one script of requests."""

import pytest
from load_drop import Adaptive, HiSparse, play


@pytest.fixture(scope="module")
def adaptive():
    return play(Adaptive)


@pytest.fixture(scope="module")
def hisparse():
    return play(HiSparse)


def test_both_play_the_same_script_and_lose_history_under_load(adaptive, hisparse):
    assert adaptive.history_rows == hisparse.history_rows
    for outcome in (adaptive, hisparse):
        assert outcome.resident_rows[0] <= 0.6 * outcome.history_rows[0]


def test_after_the_load_drop_history_comes_back_only_with_adaptive_residency(adaptive, hisparse):
    """vLLM's own keeps what is new; a page once lost is lost for the request."""
    new_rows = hisparse.history_rows[2] - hisparse.history_rows[1]
    assert hisparse.resident_rows[2] - hisparse.resident_rows[1] <= new_rows + 16
    assert hisparse.resident_rows[2] <= 0.5 * hisparse.history_rows[2]
    assert adaptive.resident_rows[2] - adaptive.resident_rows[1] >= 2 * new_rows
    assert adaptive.resident_rows[2] + adaptive.cache_rows[2] >= adaptive.history_rows[2]


def test_only_with_adaptive_residency_the_request_that_comes_last_runs_at_once(adaptive, hisparse):
    assert (adaptive.waited_steps, adaptive.preemptions) == (0, 0)
    assert hisparse.waited_steps > 0
