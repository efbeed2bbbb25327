import gc
import weakref
from types import SimpleNamespace

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from vllm_dhisparse.core.commands import StepCommands

from .kv_setup import Setup, indexer_spec, make_kv_cache_manager, make_request, make_state


def test_an_engine_that_is_gone_leaves_nothing_behind():
    setup = Setup()
    kv = make_kv_cache_manager(setup)
    state = make_state(kv, setup)
    kv.allocate_slots(make_request("a", range(100)), 100)
    gone = weakref.ref(kv.block_pool)
    del kv, state
    gc.collect()
    assert gone() is None


def test_a_cache_without_latent_groups_is_refused():
    kv = KVCacheManager(
        KVCacheConfig(
            num_blocks=10,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["indexer"], indexer_spec())],
        ),
        max_model_len=1000,
        scheduler_block_size=64,
        hash_block_size=64,
    )
    with pytest.raises(ValueError, match="needs latent and indexer KV groups, got: MLAAttention"):
        make_state(kv, Setup())


def test_steps_are_numbered_also_when_nothing_happens():
    setup = Setup()
    state = make_state(make_kv_cache_manager(setup), setup)
    state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={}))
    assert [state.take_commands() for _ in range(2)] == [StepCommands(0), StepCommands(1)]


def test_two_requests_of_one_step_share_the_pages_of_their_hit():
    setup = Setup(num_groups=1, num_pages=6, num_drafts=0)
    kv = make_kv_cache_manager(setup)
    state = make_state(kv, setup)
    first = make_request("a", range(256))
    kv.allocate_slots(first, 256)
    state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={"a": 256}))
    kv.free(first)
    state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={}))
    assert (state.pages.num_free, state.pages.num_idle) == (2, 4)
    for request_id in "bc":
        request = make_request(request_id, [*range(256), ord(request_id)])
        computed, num_hit, *_ = kv.get_computed_blocks(request)
        state.on_new_request(request, num_hit)
        assert num_hit == 256
        blocks = kv.allocate_slots(
            request,
            1,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=computed,
            full_sequence_must_fit=True,
        )
        assert blocks is not None, "the second finds the pages already in use"
        state.on_admitted(request, kv.get_blocks(request_id))
    assert state.pages.room() == 0
    state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={"b": 1, "c": 1}))
    assert state.pages.num_free == 0
    state.check_integrity()
