from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_dhisparse.core.commands import UnitAdded, UnitState
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import DHiSparseManager, register_latent_spec

from .kv_setup import (
    BLOCK_TOKENS,
    PAGE_TOKENS,
    Setup,
    make_kv_cache_manager,
    make_request,
    make_state,
)


def start(setup=None, **kwargs):
    setup = setup or Setup(num_groups=4, num_drafts=0)
    kv = make_kv_cache_manager(setup, **kwargs)
    return kv, make_state(kv, setup)


def admit(kv, state, request, num_tokens=None):
    computed, num_hit, *_ = kv.get_computed_blocks(request)
    state.on_new_request(request, num_hit)
    blocks = kv.allocate_slots(
        request,
        num_tokens or request.num_tokens - num_hit,
        num_new_computed_tokens=num_hit,
        new_computed_blocks=computed,
        full_sequence_must_fit=True,
    )
    if blocks is not None:
        state.on_admitted(request, kv.get_blocks(request.request_id))
        state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={request.request_id: 1}))
        request.num_computed_tokens = num_hit + (num_tokens or request.num_tokens - num_hit)
    return blocks


def table_of(kv, request_id, group):
    return kv.get_block_ids(request_id)[group]


def test_registration_keeps_vllms_own_specs_and_can_be_repeated():
    register_latent_spec()
    register_latent_spec()
    spec = DHiSparseLatentSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, base_units_per_request=1
    )
    assert KVCacheSpecRegistry.get_manager_class(spec) is DHiSparseManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is DHiSparseLatentSpec


def test_a_manager_without_its_connector_says_so():
    kv = make_kv_cache_manager(Setup())
    with pytest.raises(RuntimeError, match="need the DHiSparse connector"):
        kv.allocate_slots(make_request("a", range(30)), 30)


@pytest.mark.parametrize("num_indexer_groups", [1, 3])
@pytest.mark.parametrize("indexer_first", [False, True])
@pytest.mark.parametrize("takes_all", [False, True])
def test_f24_f27_the_first_pool_that_admits_has_exactly_the_required_blocks(
    num_indexer_groups, indexer_first, takes_all
):
    """Optional units are in the way of nobody, and a refused request leaves no trace."""
    tail = 14  # two chunks of 96 tokens in blocks of 16, starting inside a block
    required = 7 * num_indexer_groups + 4 * (min(25, tail - 1) + 2)
    admitted = []
    for num_blocks in range(required - 5, required + 6):
        setup = Setup(
            num_blocks=num_blocks + 1,
            num_groups=4,
            num_indexer_groups=num_indexer_groups,
            indexer_first=indexer_first,
            num_drafts=0,
        )
        kv, state = start(setup)
        if takes_all:
            state.ledger.optional.adopt(1000, head_reserve_blocks=0)
            assert state.ledger.levels().optional_units == num_blocks // 4
        before = (state.ledger.levels(), state.pages.room(), state.take_commands().commands)
        blocks = admit(kv, state, make_request("a", range(400)), 96)
        if blocks is None:
            after = (state.ledger.levels(), state.pages.room(), before[2])
            assert after == before
            assert state.take_commands().commands == ()
            assert not any(m.req_to_blocks for m in kv.coordinator.single_type_managers)
        else:
            admitted.append(num_blocks)
        state.check_integrity()
    assert admitted[0] == required


def test_a_prefix_hit_gives_null_blocks_at_the_head_and_keeps_its_pages():
    kv, state = start()
    first = make_request("a", range(300))
    admit(kv, state, first)
    pages = [state.pages.page_of(block) for block in table_of(kv, "a", 4)]
    kv.free(first)
    second = make_request("b", [*range(256), *[7] * 60])
    admit(kv, state, second)
    for group in range(4):
        table = table_of(kv, "b", group)
        assert table[:16] == [0] * 16
        assert len(table) == 20
        assert 0 not in table[16:]
    assert [state.pages.page_of(block) for block in table_of(kv, "b", 4)[:4]] == pages[:4]
    state.check_integrity()


def test_full_tails_are_absorbed_up_to_the_processed_length_only():
    kv, state = start()
    request = make_request("a", range(200))
    admit(kv, state, request, 96)
    request.num_in_flight_tokens = 18  # 78 tokens are processed: four full blocks
    kv.allocate_slots(request, 96)
    assert state.ledger.levels()[1:] == (8, 2, 2), "the first two are the share"
    for group in range(4):
        table = table_of(kv, "a", group)
        assert table[:4] == [0] * 4
        assert 0 not in table[4:]
        assert len(table) == 12
    state.check_integrity()


def test_fixed_residency_returns_full_tails_to_the_pool():
    kv, state = start(Setup(num_groups=4, num_drafts=0, residency="fixed"))
    request = make_request("a", range(96))
    admit(kv, state, request)
    free = kv.block_pool.get_num_free_blocks()
    kv.remove_skipped_blocks("a", 96)
    assert kv.block_pool.get_num_free_blocks() == free + 4 * 4, "two are the share"
    assert state.ledger.levels()[1:] == (0, 2, 0)
    state.check_integrity()


def test_the_tail_of_a_long_prefill_stays_bounded():
    kv, state = start(Setup(num_groups=4, num_drafts=0, num_pages=400, num_blocks=600))
    request = make_request("a", range(5000))
    admit(kv, state, request, 96)
    while request.num_computed_tokens < 5000:
        request.num_in_flight_tokens = 96
        count = min(96, 5000 - request.num_computed_tokens)
        assert kv.allocate_slots(request, count) is not None
        state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={"a": count}))
        request.num_computed_tokens += count
        assert state.ledger.levels().tail_units <= state.max_tail_blocks
    assert state.pages.num_bound("a") == -(-5000 // PAGE_TOKENS)
    state.check_integrity()


def test_f23_waiting_for_pages_ends_when_a_request_ends():
    kv, state = start(Setup(num_groups=2, num_pages=3, num_drafts=0))
    first = make_request("a", range(130))
    assert admit(kv, state, first) is not None
    second = make_request("b", [1, *range(100)])
    assert admit(kv, state, second) is None
    assert state.take_page_waits() == 1
    kv.free(first)
    assert admit(kv, state, second) is not None, "idle pages count as room"
    assert state.take_page_waits() == 0
    state.check_integrity()


def test_f23_growth_of_a_running_request_beyond_the_pages_is_refused():
    kv, state = start(Setup(num_groups=2, num_pages=2, num_drafts=0))
    request = make_request("a", range(128))
    admit(kv, state, request)
    request.append_output_token_ids(1)
    assert kv.allocate_slots(request, 1) is None
    assert state.take_page_waits() == 1
    state.check_integrity()


def test_blocks_of_the_tail_are_named_for_zeroing_in_a_cache_of_mixed_precision():
    kv, state = start()
    assert kv.kv_cache_config.needs_kv_cache_zeroing
    state.ledger.optional.adopt(3, 0)
    admit(kv, state, make_request("a", range(40)))
    added = [c for c in state.take_commands().commands if isinstance(c, UnitAdded)]
    tails = {block for c in added if c.state is UnitState.TAIL for block in c.blocks}
    # Slots of other units are written before they are read.
    assert set(kv.take_new_block_ids()) == tails | set(table_of(kv, "a", 4))


def test_f28_deferred_frees_return_tail_blocks_only():
    kv, state = start()
    request = make_request("a", range(96))
    admit(kv, state, request)
    kv.remove_skipped_blocks("a", 48)
    blocks = kv.pop_blocks_for_free(request)
    assert all(isinstance(block, KVCacheBlock) and not block.is_null for block in blocks)
    assert len(blocks) == 3 * 4 + 2
    state.check_integrity(block.block_id for block in blocks)
    kv.block_pool.free_blocks(reversed(blocks))
    state.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_cache_reset_works_with_optional_units_but_not_with_a_running_request(caching):
    kv, state = start(Setup(num_groups=4, num_drafts=0, caching=caching))
    request = make_request("a", range(96))
    admit(kv, state, request)
    kv.remove_skipped_blocks("a", 96)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert state.ledger.levels().optional_units == 6
    assert kv.reset_prefix_cache()
    assert state.ledger.levels() == (219, 0, 0, 0)
    assert state.pages.num_free == 40
    state.check_integrity()


def test_events_and_metrics_see_nothing_unusual():
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    kv, state = start(enable_kv_cache_events=True, metrics_collector=collector)
    request = make_request("a", range(256))
    admit(kv, state, request)
    kv.remove_skipped_blocks("a", 256)
    kv.free(request)
    state.ledger.optional.adopt(20, 8)
    kv.block_pool.get_new_blocks(kv.block_pool.get_num_free_blocks())
    groups = {event.group_idx for event in kv.take_events()}
    assert groups == {4}, "only the indexer group has prefixes"
    assert state.ledger.levels().optional_units == 0
    assert state.pages.num_free == 40


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257])
def test_f30_every_length_returns_everything(length):
    kv, state = start(Setup(num_groups=3, num_drafts=0))
    request = make_request("a", range(length))
    admit(kv, state, request)
    assert len(table_of(kv, "a", 0)) == -(-length // BLOCK_TOKENS)
    kv.free(request)
    state.check_integrity()
    assert kv.block_pool.get_num_free_blocks() == 219
    assert state.pages.room() == 40


def test_f33_a_request_that_is_refused_and_aborted_leaves_nothing():
    kv, state = start(Setup(num_groups=2, num_pages=1, num_drafts=0))
    request = make_request("a", range(130))
    assert admit(kv, state, request) is None
    kv.free(request)
    state.check_integrity()
    assert state.pages.room() == 1


@pytest.mark.parametrize("reserve", [0, 48])
def test_inside_the_reserve_optional_units_cost_no_prefix_hit(reserve):
    kv, state = start(Setup(num_groups=4, num_drafts=0, num_blocks=120, base_units=0))
    for request_id in "abcd":
        request = make_request(request_id, [ord(request_id), *range(130)])
        admit(kv, state, request)
        kv.free(request)
    while state.ledger.optional.adopt(100, head_reserve_blocks=0):
        pass
    state.ledger.optional.refill_reserve(reserve)
    taken = kv.block_pool.get_new_blocks(48)
    hits = [
        kv.get_computed_blocks(make_request("e", [ord(request_id), *range(140)]))[1]
        for request_id in "abcd"
    ]
    assert hits == ([128] * 4 if reserve else [0] * 4)
    kv.block_pool.free_blocks(taken)
    state.check_integrity()
