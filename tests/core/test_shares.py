from hypothesis import given
from hypothesis import strategies as st

from vllm_dhisparse.core.ledger import Ledger
from vllm_dhisparse.core.shares import Shares
from vllm_dhisparse.simulator.pool import SimulatedPool


def test_a_share_is_what_the_history_has_and_at_most_the_base():
    shares = Shares(3)
    shares.start("short", 0, 0)
    assert shares.required_units() == 0
    shares.extend("short", 2)
    assert shares.required_units() == 2
    assert shares.required_units(history_units=9) == 2 + 3
    shares.start("long", 9, 0)
    shares.extend("short", 2)
    assert shares.required_units() == 3 + 3
    shares.end("long")
    shares.set_base_units(1)
    assert shares.required_units() == 1
    shares.check_integrity({"short"})


def test_history_that_requests_share_counts_once():
    shares = Shares(4)
    shares.start("first", 6, 0)
    for number in range(5):
        assert shares.required_units(6, 6) == min(4 * (number + 2), 6)
        shares.start(str(number), 6, 6)
        assert shares.required_units() == min(4 * (number + 2), 6)
    shares.extend("first", 3)
    assert shares.required_units() == 9
    shares.end("first")  # the others have the six, of which four counts were of sharing
    shares.shared_units = 4 * 6
    assert shares.required_units() == 6


def test_a_surplus_is_released_and_what_is_missing_grows_back_out_of_full_tails():
    ledger = Ledger(SimulatedPool(60), 2, 4, "adaptive", [])
    ledger.claim_share("a", 5)
    ledger.claim_share("b", 5)  # not known yet to be the same
    assert ledger.levels().required_units == 8
    ledger.settle(5)
    assert ledger.levels().required_units == 5
    ledger.check_integrity()
    ledger.end_request("a")  # the rows are those of the other now
    assert ledger.levels().required_units == 4
    ledger.claim_share("c", 3)
    ledger.settle(3)
    ledger.settle(0)
    assert ledger.levels().required_units == 5
    ledger.grow_tail("b", 5, 3)
    ledger.absorb_tail("b", 8)
    assert ledger.levels()[1:4] == (0, 7, 4), "two of three complete the shares"
    ledger.check_integrity()


histories = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8)


@given(st.integers(0, 6), histories)
def test_required_units_are_never_more_than_distinct_history(base_units, hits):
    shares, distinct = Shares(base_units), 0
    for number, (history_units, shared_units) in enumerate(hits):
        shared_units = min(history_units, shared_units)
        before = shares.required_units()
        expected = shares.required_units(history_units, shared_units)
        shares.start(str(number), history_units, shared_units)
        distinct += history_units - shared_units
        assert shares.required_units() == expected >= before
        assert expected <= min(distinct, base_units * (number + 1))
