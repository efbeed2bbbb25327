"""Optional units cost no prefix hits: vLLM's real KVCacheManager under a small scheduler."""

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)
from vllm.v1.request import Request

from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import register_latent_spec
from vllm_dhisparse.integration.scheduler_state import SchedulerState

UNIT_TOKENS, PAGE_TOKENS, CHUNK_TOKENS = 16, 64, 96
GROUPS, BASE_UNITS, NUM_BLOCKS, MAX_RUNNING = 3, 2, 260, 6
PREFIXES, STEPS = 24, 700

# One step admits one request and prefills one chunk; all others may begin a unit and a page.
HEAD_RESERVE_BLOCKS = (
    GROUPS * (CHUNK_TOKENS // UNIT_TOKENS + 1 + BASE_UNITS + MAX_RUNNING)
    + CHUNK_TOKENS // PAGE_TOKENS
    + 1
    + MAX_RUNNING
)


def make_manager():
    latent = DHiSparseLatentSpec(
        block_size=UNIT_TOKENS,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        base_units_per_request=BASE_UNITS,
    )
    indexer = MLAAttentionSpec(
        block_size=PAGE_TOKENS,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    groups = [KVCacheGroupSpec([f"latent.{group}"], latent) for group in range(GROUPS)]
    groups.append(KVCacheGroupSpec(["indexer"], indexer))
    return KVCacheManager(
        KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=10_000,
        scheduler_block_size=PAGE_TOKENS,
        hash_block_size=UNIT_TOKENS,
    )


class Engine:
    """Requests that share prefixes, decoded without a model; ``controller`` None = fixed."""

    def __init__(self, controller, seed):
        self.kv = make_manager()
        residency = "adaptive" if controller else "fixed"
        self.state = SchedulerState(self.kv, 400, residency, CHUNK_TOKENS, 0)
        self.residency = controller and self.state.residency(controller)
        self.random = random.Random(seed)
        self.hasher = get_request_block_hasher(UNIT_TOKENS, sha256)
        lengths = [self.random.randrange(64, 400) for _ in range(PREFIXES)]
        self.prefixes = [self.tokens(length) for length in lengths]
        self.waiting, self.running = deque(), []
        self.num_admitted = self.num_hit_tokens = self.num_preemptions = self.most_optional = 0

    def tokens(self, count):
        return [self.random.randrange(1000) for _ in range(count)]

    def arrive(self):
        number = self.num_admitted + len(self.waiting)
        prefix = self.prefixes[int(PREFIXES * self.random.random() ** 2)]
        request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=prefix + self.tokens(self.random.randrange(10, 120)),
            sampling_params=SamplingParams(max_tokens=self.random.randrange(5, 60)),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.waiting.append(request)

    def step(self):
        if not self.waiting:
            self.arrive()
        self.kv.new_step_starts()
        scheduled, chunk_left = {}, CHUNK_TOKENS
        for request in list(self.running):
            missing = request.num_tokens - request.num_computed_tokens
            count = missing if missing == 1 else min(missing, chunk_left)
            if count:
                assert self.kv.allocate_slots(request, count), "required memory fits here"
                scheduled[request.request_id] = count
                chunk_left -= count if missing > 1 else 0
        if chunk_left and len(self.running) < MAX_RUNNING:
            scheduled |= self.admit(self.waiting[0], chunk_left)
        self.state.bind_scheduled(SimpleNamespace(num_scheduled_tokens=scheduled))
        self.control()
        for request in list(self.running):
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(self.random.randrange(1000))
            if request.num_output_tokens >= request.max_tokens:
                self.running.remove(request)
                self.kv.free(request)

    def admit(self, request, chunk_left):
        computed, num_hit, *_ = self.kv.get_computed_blocks(request)
        self.state.on_new_request(request, num_hit)
        count = min(chunk_left, request.num_tokens - num_hit)
        blocks = self.kv.allocate_slots(
            request,
            count,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=computed,
            full_sequence_must_fit=True,
        )
        assert blocks is not None, "required memory fits here"
        self.state.on_admitted(request, self.kv.get_blocks(request.request_id))
        request.num_computed_tokens = num_hit
        self.running.append(self.waiting.popleft())
        self.num_admitted += 1
        self.num_hit_tokens += num_hit
        return {request.request_id: count}

    def control(self):
        if self.residency is None:
            return
        self.residency.adapt(
            waiting_blocks=0,
            growth_blocks=GROUPS * len(self.running) // UNIT_TOKENS,
            fetched_rows=1000,
        )
        self.state.take_commands()
        self.most_optional = max(self.most_optional, self.state.ledger.levels().optional_units)


def hit_tokens_per_request(controller):
    hit_tokens = admitted = 0
    for seed in range(3):
        engine = Engine(controller, seed)
        for _ in range(STEPS):
            engine.step()
        engine.state.check_integrity()
        if controller:
            assert engine.most_optional >= 20
        hit_tokens += engine.num_hit_tokens
        admitted += engine.num_admitted
    return hit_tokens / admitted


@pytest.fixture(scope="module", autouse=True)
def setup():
    register_latent_spec()
    init_none_hash(sha256)


@pytest.fixture(scope="module")
def without_optional_units(setup):
    return hit_tokens_per_request(None)


def test_with_the_head_reserve_prefix_hits_are_those_without_optional_units(
    without_optional_units,
):
    got = hit_tokens_per_request(ResidencyController(head_reserve_blocks=HEAD_RESERVE_BLOCKS))
    print(f"\nprefix-hit tokens per request: {got:.1f}, {without_optional_units:.1f} without")
    assert got >= 0.99 * without_optional_units


def test_without_the_head_reserve_optional_units_outlive_cached_prefixes(without_optional_units):
    got = hit_tokens_per_request(ResidencyController(head_reserve_blocks=0))
    print(f"\nprefix-hit tokens per request: {got:.1f}, {without_optional_units:.1f} without")
    assert got <= 0.95 * without_optional_units
