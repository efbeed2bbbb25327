"""vLLM's real KVCacheManager over latent and indexer groups, and requests for it."""

from dataclasses import dataclass

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

from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import register_latent_spec
from vllm_dhisparse.integration.scheduler_state import SchedulerState

BLOCK_TOKENS = 16
PAGE_TOKENS = 64
MAX_CHUNK = 96

register_latent_spec()
init_none_hash(sha256)
block_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 220
    num_pages: int = 40
    block_tokens: int = BLOCK_TOKENS
    page_tokens: int = PAGE_TOKENS
    num_groups: int = 3
    num_indexer_groups: int = 1
    base_units: int = 2
    num_drafts: int = 3
    lag: int = 1
    caching: bool = True
    residency: str = "adaptive"
    indexer_first: bool = False
    defers_frees: bool = False
    # Of the worker only.
    implementation: str = "cpu"
    num_index_groups: int = 1
    top_k: int = 8
    staging_rows: int = 2048
    seed: int = 0


def latent_spec(base_units, block_tokens=BLOCK_TOKENS):
    return DHiSparseLatentSpec(
        block_size=block_tokens,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        base_units_per_request=base_units,
    )


def indexer_spec(page_tokens=PAGE_TOKENS):
    return MLAAttentionSpec(
        block_size=page_tokens,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )


def make_kv_cache_manager(setup, **kwargs):
    latent = [
        KVCacheGroupSpec([f"latent.{g}"], latent_spec(setup.base_units, setup.block_tokens))
        for g in range(setup.num_groups)
    ]
    indexer = [
        KVCacheGroupSpec([f"indexer.{g}"], indexer_spec(setup.page_tokens))
        for g in range(setup.num_indexer_groups)
    ]
    groups = indexer + latent if setup.indexer_first else latent + indexer
    return KVCacheManager(
        KVCacheConfig(num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=100_000,
        scheduler_block_size=setup.page_tokens,
        hash_block_size=BLOCK_TOKENS,
        enable_caching=setup.caching,
        **kwargs,
    )


def make_state(kv_cache_manager, setup):
    return SchedulerState(
        kv_cache_manager,
        num_pages=setup.num_pages,
        residency=setup.residency,
        max_in_flight_tokens=(setup.lag + 1) * MAX_CHUNK,
        num_lookahead_tokens=setup.num_drafts,
        num_drafts=setup.num_drafts,
    )


def make_request(request_id, tokens, max_tokens=10_000):
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=block_hasher,
    )
