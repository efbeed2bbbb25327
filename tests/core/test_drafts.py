"""Draft length under pressure, and the price of a draft."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dhisparse.core.drafts import FetchEstimate, FetchPrice, draft_limit

blocks = st.integers(0, 300)


def growth(requests: int, groups: int = 5):
    return lambda drafts: ceil(requests * (1 + drafts) / 64) * groups


@given(st.integers(0, 8), blocks, blocks, st.integers(0, 200))
def test_drafts_get_shorter_before_a_request_is_refused(num_drafts, free, waiting, requests):
    need = growth(requests)
    limit = draft_limit(num_drafts, free, waiting, need)

    lengths = range(num_drafts + 1)
    beside = [k for k in lengths if need(k) + waiting <= free]
    without = [k for k in lengths if need(k) <= free]
    assert limit == max(beside or without or [0])


def test_the_length_follows_the_room():
    assert draft_limit(7, 100, 0, growth(128)) == 7
    assert draft_limit(7, 100, 40, growth(128)) == 5  # 12 units of growth fit beside it
    assert draft_limit(7, 100, 99, growth(128)) == 7  # no length lets it in
    assert draft_limit(7, 50, 0, growth(128)) == 4  # 10 units; more would preempt
    assert draft_limit(7, 4, 0, growth(128)) == 0


def test_a_rejected_draft_costs_about_half_an_accepted_one():
    def price(acceptance):
        return FetchPrice(
            missed_rows=100, bytes_per_row=1000, link_bytes_per_ms=50_000, acceptance=acceptance
        ).ms_per_draft

    assert price(1) == pytest.approx(2.0)
    assert price(0) == pytest.approx(1.1)
    assert price(0.5) == pytest.approx(1.55)


@pytest.mark.parametrize(
    "wrong",
    [{"missed_rows": -1}, {"bytes_per_row": -1}, {"link_bytes_per_ms": 0}, {"acceptance": 1.1}],
)
def test_a_price_out_of_range_is_refused(wrong):
    right = {"missed_rows": 1, "bytes_per_row": 1, "link_bytes_per_ms": 1, "acceptance": 0.5}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FetchPrice(**{**right, **wrong})


def steps_of_a_price(missed_rows, acceptance, num_steps=400):
    """What steps of 10 requests with 4 drafts each bring when a draft costs what it should."""
    estimate = FetchEstimate()
    accepted = round(40 * acceptance)
    fetched = missed_rows * (10 + accepted + 0.55 * (40 - accepted))
    for _ in range(num_steps):
        estimate.observe(10, 40, accepted, round(fetched))
    return estimate


@pytest.mark.parametrize("acceptance", [0, 0.25, 1])
def test_an_estimate_finds_the_price_behind_its_steps(acceptance):
    price = steps_of_a_price(100, acceptance).price(1000, 50_000)
    assert price.missed_rows == pytest.approx(100)
    assert price.acceptance == pytest.approx(acceptance)


def test_an_estimate_follows_the_load_within_some_hundred_steps():
    estimate = steps_of_a_price(100, 0.5)
    for _ in range(200):
        estimate.observe(10, 40, 20, 0)
    assert estimate.price(1000, 50_000).missed_rows < 2


def test_nothing_is_known_before_drafts_were_verified():
    estimate = FetchEstimate()
    assert estimate.price(1000, 50_000) is None
    estimate.observe(3, 0, 0, 50)
    assert estimate.price(1000, 50_000) is None
