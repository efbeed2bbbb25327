import pytest
from base_units import set_base_units
from hypothesis import given
from hypothesis import strategies as st

from vllm_dhisparse.core.commands import UnitAdded, UnitLost, UnitMoved, UnitState
from vllm_dhisparse.core.ledger import Ledger
from vllm_dhisparse.simulator.pool import SimulatedPool


def make_ledger(num_blocks=24, num_groups=2, base_units=1, residency="adaptive"):
    source = SimulatedPool(num_blocks)
    return source, Ledger(source, num_groups, base_units, residency, [])


def test_tail_unit_is_numbered_once_and_moved_in_place():
    _, ledger = make_ledger()
    ledger.claim_share("a", 0)
    ledger.grow_tail("a", 0, 3)
    assert ledger.take_commands() == (
        UnitAdded(0, UnitState.TAIL, (0, 1)),
        UnitAdded(1, UnitState.TAIL, (2, 3)),
        UnitAdded(2, UnitState.TAIL, (4, 5)),
    )
    assert [ledger.tail_block("a", 2, group) for group in range(2)] == [4, 5]
    ledger.absorb_tail("a", 2)
    assert ledger.take_commands() == (
        UnitMoved(0, UnitState.REQUIRED),
        UnitMoved(1, UnitState.OPTIONAL),
    )
    assert ledger.levels() == (20, 1, 1, 1)
    ledger.check_integrity()


@given(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=6))
def test_a_share_grows_out_of_full_tails_and_never_needs_a_block(base_units, hit_units, growth):
    """F26: tail and share are never more units than hold all rows of the request."""
    _, ledger = make_ledger(num_blocks=60, base_units=base_units)
    ledger.claim_share("a", hit_units)
    end = hit_units
    for number in growth:
        ledger.grow_tail("a", end, number)
        end += number
        before = ledger.levels()
        ledger.absorb_tail("a", end - 1)
        levels = ledger.levels()
        assert levels.required_units == min(base_units, max(end - 1, hit_units))
        assert levels.tail_units + levels.required_units <= end
        freed_units = levels.optional_units - before.optional_units
        assert levels.free_blocks - before.free_blocks == 2 * freed_units >= 0
        ledger.check_integrity()


def test_fixed_residency_frees_full_tails_and_released_shares():
    source, ledger = make_ledger(residency="fixed")
    ledger.claim_share("a", 1)
    ledger.grow_tail("a", 1, 2)
    ledger.absorb_tail("a", 2)
    assert source.queue[:2] == [2, 3], "the next allocation takes them"
    assert ledger.levels() == (20, 1, 1, 0)
    ledger.take_commands()
    ledger.end_request("a")
    assert ledger.take_commands() == (UnitLost(2), UnitLost(0))
    source.release([4, 5])  # as vLLM frees the tail
    assert source.num_free == 24
    ledger.check_integrity()


def test_losing_one_block_loses_the_unit_in_all_groups():
    source, ledger = make_ledger(num_blocks=6)
    ledger.optional.adopt(3, head_reserve_blocks=0)
    ledger.take_commands()
    assert source.take(1) == [0]
    assert ledger.take_commands() == (UnitLost(0),)
    assert ledger.levels().optional_units == 2
    ledger.check_integrity()
    source.take(1)  # its sibling: nothing of the unit is left to lose
    assert ledger.take_commands() == ()


def test_numbers_of_units_lost_by_an_allocation_are_used_by_it():
    _, ledger = make_ledger(num_blocks=4, base_units=0)
    ledger.optional.adopt(2, head_reserve_blocks=0)
    ledger.claim_share("a", 0)
    ledger.take_commands()
    ledger.grow_tail("a", 0, 2)
    lost_then_added = ledger.take_commands()
    assert [type(command) for command in lost_then_added] == [UnitLost] * 2 + [UnitAdded] * 2
    assert {command.unit for command in lost_then_added} == {0, 1}
    assert ledger.max_units == 2
    ledger.check_integrity()


def test_a_share_pins_the_newest_optional_units_first():
    source, ledger = make_ledger(num_blocks=8, base_units=3)
    ledger.optional.adopt(2, head_reserve_blocks=4)
    ledger.take_commands()
    ledger.claim_share("a", 7)
    assert ledger.take_commands() == (
        UnitMoved(1, UnitState.REQUIRED),
        UnitMoved(0, UnitState.REQUIRED),
        UnitAdded(2, UnitState.REQUIRED, (0, 1)),
    )
    assert source.num_free == 2
    ledger.check_integrity()


def test_a_released_share_stays_readable():
    source, ledger = make_ledger()
    ledger.claim_share("a", 1)
    ledger.claim_share("b", 1)
    ledger.take_commands()
    ledger.end_request("a")
    ledger.end_request("a")
    ledger.end_request("never seen")
    assert ledger.take_commands() == (UnitMoved(0, UnitState.OPTIONAL),)
    assert source.num_free == 22
    ledger.check_integrity()


def test_base_units_change_for_all_running_requests_or_not_at_all():
    source, ledger = make_ledger(num_blocks=12)
    ledger.claim_share("a", 9)
    ledger.claim_share("b", 2)
    with pytest.raises(ValueError, match="10 blocks are missing, 8 are free"):
        set_base_units(ledger, 5)
    assert ledger.levels() == (8, 0, 2, 0)
    set_base_units(ledger, 4)
    assert source.num_free == 0
    set_base_units(ledger, 0)
    assert ledger.levels() == (12, 0, 0, 6)
    ledger.check_integrity()


def test_adopt_takes_the_plain_blocks_behind_the_reserve_and_no_cached_prefixes():
    source, ledger = make_ledger(num_blocks=12)
    source.cached = {10, 11}
    assert len(ledger.optional.adopt(2, head_reserve_blocks=4)) == 2
    assert source.queue == [0, 1, 2, 3, 4, 5, 10, 11, 6, 7, 8, 9]
    assert len(ledger.optional.adopt(2, head_reserve_blocks=4)) == 1
    assert len(ledger.optional.adopt(2, head_reserve_blocks=4)) == 0
    assert source.cached == {10, 11}
    ledger.check_integrity()


@pytest.mark.parametrize("is_cached", [True, False])
def test_nothing_is_adopted_while_the_head_is_not_the_whole_reserve(is_cached):
    source, ledger = make_ledger(num_blocks=12)
    if is_cached:
        source.cached = {3}
    else:
        ledger.optional.adopt(4, head_reserve_blocks=4)
        source.take(2)
    assert ledger.optional.adopt(2, head_reserve_blocks=4) == []
    assert ledger.optional.refill_reserve(4) == (0 if is_cached else 1)
    ledger.check_integrity()


def test_plain_blocks_are_those_that_lie_before_all_others_whoever_put_them_there():
    source, ledger = make_ledger(num_blocks=12, base_units=0)
    ledger.claim_share("a", 0)
    ledger.grow_tail("a", 0, 4)
    assert ledger.optional.find_plain() == 4
    ledger.absorb_tail("a", 3)  # three optional units behind them
    assert ledger.optional.find_plain() == 4
    ledger.end_request("a")
    source.release([6, 7])  # as vLLM frees the tail
    assert ledger.optional.find_plain() == 6
    assert source.take(3) == [6, 7, 8]
    assert ledger.optional.find_plain() == 3
    source.take(4)  # the plain ones, and one of a unit: its other block is plain now
    assert ledger.levels().optional_units == 2
    assert ledger.optional.find_plain() == 1
    ledger.check_integrity()


def test_what_is_evicted_is_plain():
    source, ledger = make_ledger(num_blocks=8)
    source.cached = {2, 5}
    assert ledger.optional.find_plain() == 2
    source.evict_prefix([5])
    assert ledger.optional.find_plain() == 3
    ledger.check_integrity()


def test_adopt_never_takes_an_optional_unit_again():
    _, ledger = make_ledger(num_blocks=8)
    assert len(ledger.optional.adopt(10, head_reserve_blocks=0)) == 4
    assert len(ledger.optional.adopt(10, head_reserve_blocks=0)) == 0


def test_no_step_walks_over_what_is_known():
    source, ledger = make_ledger(num_blocks=1000)
    walks = []
    plain_head = source.plain_head

    def walk(is_known):
        seen = []
        plain_head(lambda block: seen.append(block) or is_known(block))
        walks.append(len(seen))
        return plain_head(is_known)

    source.plain_head = walk
    for _ in range(5):
        ledger.optional.adopt(4, head_reserve_blocks=100)
        source.take(3)
        ledger.optional.refill_reserve(100)
    assert walks == [1000] + 9 * [1]


def test_the_oldest_units_are_given_up_first_and_become_the_head():
    source, ledger = make_ledger(num_blocks=8)
    ledger.optional.adopt(4, head_reserve_blocks=0)
    ledger.take_commands()
    assert ledger.optional.give_up(1) == 1
    assert ledger.take_commands() == (UnitLost(0),)
    assert source.queue[:2] == [0, 1]
    assert ledger.optional.give_up(10) == 3
    assert source.num_free == 8
    ledger.check_integrity()


@pytest.mark.parametrize(("reserve", "given_up"), [(0, 0), (2, 0), (3, 1), (4, 1), (5, 2), (40, 3)])
def test_refill_reserve_gives_up_just_enough(reserve, given_up):
    source, ledger = make_ledger(num_blocks=12)
    ledger.optional.adopt(3, head_reserve_blocks=2)
    source.take(4)  # of the six plain blocks at the head
    assert ledger.optional.refill_reserve(reserve) == given_up
    ledger.check_integrity()


def test_refill_reserve_puts_plain_blocks_before_cached_prefixes():
    source, ledger = make_ledger(num_blocks=10)
    source.cached = {8, 9}
    ledger.optional.adopt(4, head_reserve_blocks=0)
    assert source.queue == [8, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    assert ledger.optional.refill_reserve(4) == 2
    assert source.queue == [0, 1, 2, 3, 8, 9, 4, 5, 6, 7]
    assert source.cached == {8, 9}


def make_ledger_with_ended_units():
    """Units 0 and 1 of a request that runs, 2 and 3 of one that ended; all optional."""
    source, ledger = make_ledger(num_blocks=24, base_units=0)
    for request in "ab":
        ledger.claim_share(request, 0)
        ledger.grow_tail(request, 0, 3)
        ledger.absorb_tail(request, 2)
    ledger.end_request("b")
    ledger.take_commands()
    return source, ledger


def test_what_ended_requests_left_is_given_up_before_older_units():
    _, ledger = make_ledger_with_ended_units()
    optional = ledger.optional.units()
    assert (ledger.levels().optional_units, ledger.optional.num_ended) == (4, 2)
    assert ledger.optional.give_up(3) == 3
    assert ledger.take_commands() == tuple(UnitLost(u) for u in (*optional[2:], optional[0]))
    assert (ledger.levels().optional_units, ledger.optional.num_ended) == (1, 0)


def test_recycled_units_are_empty_and_the_newest():
    source, ledger = make_ledger_with_ended_units()
    optional = ledger.optional.units()
    tail = source.queue[-4:]
    assert len(ledger.optional.recycle(1)) == 1
    lost, added = ledger.take_commands()
    assert lost == UnitLost(optional[2])
    assert added[1:] == (UnitState.OPTIONAL, tuple(tail[:2]))
    assert source.queue[-4:] == [*tail[2:], *tail[:2]]
    assert (ledger.levels().optional_units, ledger.optional.num_ended) == (4, 1)
    assert len(ledger.optional.recycle(5)) == 1
    assert ledger.optional.recycle(5) == []
