"""Decoding requests on vLLM's real KVCacheManager, with stock managers or with ours.

The blocks of GLM-5.3 with fp8_ds_mla rows: latent blocks of 64 rows, indexer blocks and host
pages of 320 tokens, seven drafts.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

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

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.integration.adaptation import controller_for
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import register_latent_spec
from vllm_dhisparse.integration.scheduler_side import SchedulerSide
from vllm_dhisparse.integration.scheduler_state import SchedulerState
from vllm_dhisparse.integration.stats import DHiSparseStats

BLOCK_TOKENS = 64
PAGE_TOKENS = 320
CHUNK_TOKENS = 8192
DRAFT_TOKENS = 7
ACCEPTED_TOKENS = 5  # of a step
BASE_UNITS = 32


class Shape(NamedTuple):
    """KV groups of a model, and the load on them."""

    latent_groups: int
    indexer_groups: int
    requests: int
    context_tokens: int

    @property
    def num_blocks(self) -> int:
        """What stock managers need, and room to decode."""
        latent = self.latent_groups * (self.context_tokens // BLOCK_TOKENS + BASE_UNITS + 16)
        return self.requests * (latent + self.indexer_groups * self.num_pages)

    @property
    def num_pages(self) -> int:
        """Of one request."""
        return self.context_tokens // PAGE_TOKENS + 16


class Stock:
    """vLLM's full-attention managers."""

    def __init__(self, shape: Shape) -> None:
        self.kv = _kv_cache_manager(shape, self.latent_spec())
        self.requests: list[Request] = []
        self.bind()
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        for number in range(shape.requests):
            # Their lengths differ, so that in each step as many requests start a block.
            length = shape.context_tokens - 61 * number % PAGE_TOKENS
            request = Request(
                request_id=f"request-{number}",
                prompt_token_ids=[number, *[1] * (length - 1)],
                sampling_params=SamplingParams(max_tokens=100_000),
                pooling_params=None,
                block_hasher=hasher,
            )
            self._prefill(request)
            self.requests.append(request)

    def latent_spec(self) -> Any:
        return MLAAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
        )

    def bind(self) -> None:
        pass

    def end_step(self, tokens: dict[str, int]) -> None:
        pass

    def schedule(self) -> None:
        """What the block manager does in one decode step."""
        self.kv.new_step_starts()
        for request in self.requests:
            assert self.kv.allocate_slots(
                request, 1 + DRAFT_TOKENS, num_lookahead_tokens=DRAFT_TOKENS
            )
        self.end_step(dict.fromkeys([r.request_id for r in self.requests], 1 + DRAFT_TOKENS))

    def update(self) -> None:
        """What a step leaves, as vLLM's scheduler notes it."""
        for request in self.requests:
            request.num_computed_tokens += ACCEPTED_TOKENS
            request.append_output_token_ids([1] * ACCEPTED_TOKENS)

    def _prefill(self, request: Request) -> None:
        while request.num_computed_tokens < request.num_prompt_tokens:
            chunk = min(CHUNK_TOKENS, request.num_prompt_tokens - request.num_computed_tokens)
            assert self.kv.allocate_slots(request, chunk, num_lookahead_tokens=DRAFT_TOKENS)
            request.num_computed_tokens += chunk
            self.end_step({request.request_id: chunk})


class Ours(Stock):
    """The managers of this package, with the connector's part of a step."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        register_latent_spec()
        super().__init__(shape)

    def latent_spec(self) -> Any:
        return DHiSparseLatentSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=576,
            dtype=torch.bfloat16,
            base_units_per_request=BASE_UNITS,
        )

    def bind(self) -> None:
        pages = self.shape.requests * self.shape.num_pages
        state = SchedulerState(
            self.kv, pages, "adaptive", 2 * CHUNK_TOKENS, DRAFT_TOKENS, DRAFT_TOKENS
        )
        engine = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=self.shape.requests
            )
        )
        # Only what a step's message reads: no engine is behind it.
        self.side = object.__new__(SchedulerSide)
        self.side.state = self.state = state
        self.side.rings = []
        self.side._draft_price = None
        self.side._sizes = SimpleNamespace(config=DHiSparseConfig())
        self.side._residency = state.residency(controller_for(DHiSparseConfig(), engine, state))
        self.side._adaptations = DHiSparseStats()
        self.side._working_set_rows = 0
        self.side._kv_cache_config = SimpleNamespace(
            num_blocks=1, kv_cache_tensors=[SimpleNamespace(size=42_240 * 20)]
        )
        self.fetched_rows = 0
        self.commands: tuple[Any, ...] = ()

    def end_step(self, tokens: dict[str, int]) -> None:
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            num_spec_tokens_to_schedule=DRAFT_TOKENS,
        )
        self.side._fetched_rows = self.fetched_rows
        self.commands = self.side.step_metadata(output).commands.commands


def _kv_cache_manager(shape: Shape, latent_spec: Any) -> KVCacheManager:
    indexer = MLAAttentionSpec(
        block_size=PAGE_TOKENS,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    groups = [KVCacheGroupSpec([f"latent.{g}"], latent_spec) for g in range(shape.latent_groups)]
    groups += [KVCacheGroupSpec([f"indexer.{g}"], indexer) for g in range(shape.indexer_groups)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=200_000,
        scheduler_block_size=PAGE_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )
