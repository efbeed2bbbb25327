"""What a scheduler step costs with our managers, beside vLLM's stock managers.

The latent rows of GLM-5.3: blocks of 64 rows in 4 or 20 groups, indexer blocks of 320
tokens.
"""

import time
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace

import torch
from harness import Figure, Sizes, benchmark, figure
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

from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import register_latent_spec
from vllm_dhisparse.integration.scheduler_state import SchedulerState

BLOCK_TOKENS = 64
PAGE_TOKENS = 320
CHUNK_TOKENS = 8192
DRAFT_TOKENS = 7
BASE_UNITS = 32


def kv_cache_manager(num_groups, num_blocks, latent_spec):
    indexer = MLAAttentionSpec(
        block_size=PAGE_TOKENS,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    groups = [KVCacheGroupSpec([f"latent.{g}"], latent_spec) for g in range(num_groups)]
    groups.append(KVCacheGroupSpec(["indexer"], indexer))
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=200_000,
        scheduler_block_size=PAGE_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def fill(kv, state, num_requests, context_tokens):
    """Prefill all requests in chunks."""
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    requests = []
    for i in range(num_requests):
        request = Request(
            request_id=f"request-{i}",
            prompt_token_ids=[i, *[1] * (context_tokens - 1)],
            sampling_params=SamplingParams(max_tokens=100_000),
            pooling_params=None,
            block_hasher=hasher,
        )
        while request.num_computed_tokens < context_tokens:
            chunk = min(CHUNK_TOKENS, context_tokens - request.num_computed_tokens)
            assert kv.allocate_slots(request, chunk, num_lookahead_tokens=DRAFT_TOKENS)
            request.num_computed_tokens += chunk
            if state is not None:
                state.bind_scheduled(output_of([request]))
        requests.append(request)
    return requests


def output_of(requests):
    return SimpleNamespace(num_scheduled_tokens={r.request_id: 1 for r in requests})


def microseconds(function):
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def decode_step(kv, state, requests, head_reserve_blocks):
    for request in requests:
        assert kv.allocate_slots(request, 1 + DRAFT_TOKENS, num_lookahead_tokens=DRAFT_TOKENS)
        request.num_computed_tokens += 5
    if state is not None:
        state.ledger.refill_reserve(head_reserve_blocks)
        state.bind_scheduled(output_of(requests))
        state.take_commands()


def measure(num_groups, num_requests, context_tokens, num_steps) -> Iterator[Figure]:
    name = f"decode step, 128 requests, {num_groups} latent groups, against stock managers"
    blocks_per_request = (
        num_groups * (context_tokens // BLOCK_TOKENS + BASE_UNITS + 8)
        + context_tokens // PAGE_TOKENS
        + 8
    )
    num_blocks = num_requests * blocks_per_request
    stock_spec = MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    spec = DHiSparseLatentSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        base_units_per_request=BASE_UNITS,
    )
    head_reserve_blocks = CHUNK_TOKENS // BLOCK_TOKENS * num_groups + CHUNK_TOKENS // PAGE_TOKENS
    stock = kv_cache_manager(num_groups, num_blocks, stock_spec)
    stock_requests = fill(stock, None, num_requests, context_tokens)
    kv = kv_cache_manager(num_groups, num_blocks, spec)
    num_pages = 2 * num_requests * (context_tokens // PAGE_TOKENS + 8)
    state = SchedulerState(kv, num_pages, "adaptive", 2 * CHUNK_TOKENS, DRAFT_TOKENS)
    requests = fill(kv, state, num_requests, context_tokens)
    state.take_commands()
    # In turn, so that both see the same noise.
    pairs = [
        (
            microseconds(lambda: decode_step(kv, state, requests, head_reserve_blocks)),
            microseconds(lambda: decode_step(stock, None, stock_requests, 0)),
        )
        for _ in range(num_steps)
    ]
    ours, baseline = (median(column) for column in zip(*pairs, strict=True))
    yield figure(name, ours, "us", baseline)
    parts = {
        "refill reserve": lambda: state.ledger.refill_reserve(head_reserve_blocks),
        "bind": lambda: state.bind_scheduled(output_of(requests)),
        "give up 16 units": lambda: state.ledger.give_up(16),
        "adopt 16 units": lambda: state.ledger.adopt(16, head_reserve_blocks),
        "give up and adopt 512 units": lambda: (
            state.ledger.give_up(512),
            state.ledger.adopt(512, 0),
        ),
    }
    for part, function in parts.items():
        value = median(microseconds(function) for _ in range(num_steps))
        yield figure(f"{part}, {num_groups} latent groups", value, "us")


@benchmark("managers")
def managers(sizes: Sizes) -> Iterator[Figure]:
    """About half a minute and 1 GB at the full sizes."""
    init_none_hash(sha256)
    register_latent_spec()
    for num_groups in (4, 20):
        steps = 6 * sizes.least_repeats
        yield from measure(num_groups, sizes.requests, sizes.scheduled_context, steps)
