"""F26: at equal device blocks the hierarchy runs no fewer requests at a time than `resident`.

In blocks of 64 rows: padding of pages and the rounding of a request's indexer keys to whole
pages are the page plan's, see test_page_plan.py.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from .kv_setup import (
    BLOCK_TOKENS,
    MAX_CHUNK,
    PAGE_TOKENS,
    Setup,
    indexer_spec,
    make_kv_cache_manager,
    make_request,
    make_state,
)
from .test_kv_groups import engine_config
from .test_kv_spec import latent_spec

GROUPS = 3


def resident_manager(num_blocks):
    """The same pool where every latent block stays in vLLM's tables."""
    latent = MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec([f"latent.{group}"], latent) for group in range(GROUPS)]
    groups.append(KVCacheGroupSpec(["indexer"], indexer_spec()))
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=100_000,
        scheduler_block_size=PAGE_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


class Pool:
    """Requests that run one after the other to their length and then stay."""

    def __init__(self, kv, state=None):
        self.kv, self.state, self.requests = kv, state, []

    def allocate(self, request, num_tokens, num_hit=0, **admission):
        blocks = self.kv.allocate_slots(request, num_tokens, **admission)
        if blocks is None:
            return False
        if self.state:
            if admission:
                self.state.on_admitted(request, self.kv.get_blocks(request.request_id))
            scheduled = SimpleNamespace(num_scheduled_tokens={request.request_id: num_tokens})
            self.state.bind_scheduled(scheduled)
        request.num_computed_tokens += num_hit + num_tokens
        return True

    def start(self, prompt_tokens, shared_tokens=0):
        number = len(self.requests)
        tokens = [0] * shared_tokens + [1 + number] * prompt_tokens
        request, prompt_tokens = make_request(str(number), tokens), len(tokens)
        computed, num_hit, *_ = self.kv.get_computed_blocks(request)
        if self.state:
            self.state.on_new_request(request, num_hit)
        admission = {
            "full_sequence_must_fit": True,
            "num_hit": num_hit,
            "num_new_computed_tokens": num_hit,
            "new_computed_blocks": computed,
        }
        while request.num_computed_tokens < prompt_tokens:
            num_computed = admission.get("num_hit", request.num_computed_tokens)
            chunk = min(MAX_CHUNK, prompt_tokens - num_computed)
            if not self.allocate(request, chunk, **admission):
                return None
            admission = {}
        self.requests.append(request)
        return request

    def decode(self, request):
        request.append_output_token_ids(1)
        return self.allocate(request, 1)

    def fill(self, prompt_tokens, output_tokens, shared_tokens=0):
        """Return how many requests of a length, after a common prefix, fit at a time."""
        while (request := self.start(prompt_tokens, shared_tokens)) is not None:
            for _ in range(output_tokens):
                if not self.decode(request):
                    return len(self.requests) - 1
        return len(self.requests)


def tier_pool(num_blocks, base_units, residency="adaptive"):
    setup = Setup(
        num_blocks=num_blocks,
        num_groups=GROUPS,
        num_drafts=0,
        num_pages=num_blocks,
        base_units=base_units,
        residency=residency,
    )
    kv = make_kv_cache_manager(setup)
    return Pool(kv, make_state(kv, setup))


@settings(max_examples=25, deadline=None)
@given(
    prompt_tokens=st.integers(1, 700),
    shared_tokens=st.sampled_from([0, 0, 64, 300]),
    output_tokens=st.integers(0, 60),
    base_units=st.integers(0, 40),
    residency=st.sampled_from(["fixed", "adaptive"]),
)
@example(prompt_tokens=1, shared_tokens=0, output_tokens=0, base_units=40, residency="fixed")
@example(prompt_tokens=16, shared_tokens=0, output_tokens=1, base_units=40, residency="adaptive")
@example(prompt_tokens=255, shared_tokens=0, output_tokens=60, base_units=16, residency="adaptive")
@example(prompt_tokens=20, shared_tokens=640, output_tokens=20, base_units=40, residency="adaptive")
def test_f26_the_tier_never_lowers_the_maximum_concurrency(
    prompt_tokens, shared_tokens, output_tokens, base_units, residency
):
    num_blocks = 240
    lengths = prompt_tokens, output_tokens, shared_tokens
    resident = Pool(resident_manager(num_blocks)).fill(*lengths)
    pool = tier_pool(num_blocks, base_units, residency)
    assert pool.fill(*lengths) >= resident
    pool.state.check_integrity()
    assert resident


def test_f26_long_requests_gain():
    resident = Pool(resident_manager(240)).fill(600, 10)
    assert tier_pool(240, base_units=2).fill(600, 10) >= 2 * resident


@pytest.mark.parametrize("base_units", [0, 40])
def test_f26_a_request_that_starves_preempts(base_units):
    """A full pool refuses growth, which vLLM answers by a preemption; that makes the room."""
    pool = tier_pool(40, base_units)
    requests = []
    while (request := pool.start(16)) is not None:
        requests.append(request)
    first, *_, last = requests
    while pool.decode(first):
        pass
    pool.kv.free(last)
    assert pool.allocate(first, 1)
    pool.state.check_integrity()
    for request in requests[:-1]:
        pool.kv.free(request)
    pool.state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={}))
    pool.state.check_integrity()
    assert pool.kv.block_pool.get_num_free_blocks() == 39


@pytest.mark.parametrize("base_units", [0, 32, 4096])
@pytest.mark.parametrize("max_model_len", [1, 64, 65, 2048, 20_000, 131_072])
def test_f26_the_size_of_the_longest_request_is_at_most_that_of_all_its_rows(
    base_units, max_model_len
):
    blocks = -(-max_model_len // 64)
    size = latent_spec(656, 42_240, base_units).max_memory_usage_bytes(
        engine_config(max_model_len=max_model_len)
    )
    assert size <= blocks * 42_240
