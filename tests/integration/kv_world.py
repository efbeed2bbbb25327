"""vLLM's real KVCacheManager under a small scheduler, with a worker that runs steps late."""

import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

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

from .model_worker import ModelWorker, Work

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
    num_groups: int = 3
    num_indexer_groups: int = 1
    base_units: int = 2
    num_drafts: int = 3
    lag: int = 1
    caching: bool = True
    residency: str = "adaptive"
    indexer_first: bool = False
    defers_frees: bool = False
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
        KVCacheGroupSpec([f"latent.{g}"], latent_spec(setup.base_units))
        for g in range(setup.num_groups)
    ]
    indexer = [
        KVCacheGroupSpec([f"indexer.{g}"], indexer_spec()) for g in range(setup.num_indexer_groups)
    ]
    groups = indexer + latent if setup.indexer_first else latent + indexer
    return KVCacheManager(
        KVCacheConfig(num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=100_000,
        scheduler_block_size=PAGE_TOKENS,
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
    )


def make_request(request_id, tokens, max_tokens=10_000):
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=block_hasher,
    )


@dataclass
class Life:
    """What the scheduler keeps of a request beside vLLM's ``Request``."""

    request: Request
    max_tokens: int
    epoch: int = 0
    prefill_end: int = 0
    steps_in_flight: int = 0


class World:
    """Every method is one event; ``check`` holds after each."""

    def __init__(self, setup):
        self.setup = setup
        self.kv = make_kv_cache_manager(setup)
        self.state = make_state(self.kv, setup)
        self.pool = self.kv.block_pool
        self.worker = ModelWorker(setup.num_groups, BLOCK_TOKENS, PAGE_TOKENS, setup.seed)
        self.prompts = random.Random(setup.seed)
        self.prefixes = [self.tokens(self.prompts.randrange(64, 400)) for _ in range(4)]
        self.waiting = deque()
        self.running = []
        self.in_flight = deque()
        self.deferred = deque()
        self.num_scheduled = self.num_updated = self.num_requests = 0
        self.num_preemptions = self.num_refusals = self.num_hit_tokens = 0

    def tokens(self, count):
        return [self.prompts.randrange(50) for _ in range(count)]

    def add_request(self, prefix, prefix_length, num_new, max_tokens):
        tokens = self.prefixes[prefix % 4][:prefix_length] + self.tokens(num_new)
        request = make_request(f"request-{self.num_requests}", tokens)
        self.num_requests += 1
        self.waiting.append(Life(request, max_tokens))

    def schedule(self):
        self.kv.new_step_starts()
        works = []
        budget = 2 * MAX_CHUNK
        was_preempting = False
        for life in list(self.running):
            request = life.request
            if life not in self.running or not budget:
                continue
            is_prefill = request.num_computed_tokens < life.prefill_end
            num_tokens = 1 + self.setup.num_drafts
            if is_prefill:
                left = life.prefill_end - request.num_computed_tokens
                num_tokens = min(MAX_CHUNK, left, budget)
            while True:
                blocks = self.kv.allocate_slots(
                    request, num_tokens, num_lookahead_tokens=self.setup.num_drafts
                )
                if blocks is not None:
                    break
                was_preempting = True
                victim = self.running[-1]
                if self.setup.defers_frees and victim.steps_in_flight:
                    break
                self.preempt(victim)
                if victim is life:
                    break
            if blocks is None:
                break
            budget = max(0, budget - num_tokens)
            works.append((life, is_prefill, num_tokens, None))
        while self.waiting and budget and not was_preempting and len(self.running) < 8:
            work = self.admit(self.waiting[0], budget)
            if work is None:
                break
            self.running.append(self.waiting.popleft())
            budget -= work[2]
            works.append(work)
        self.finish_schedule(works)

    def admit(self, life, budget):
        request = life.request
        computed, num_hit, *_ = self.kv.get_computed_blocks(request)
        self.state.on_new_request(request, num_hit)
        num_tokens = min(MAX_CHUNK, request.num_tokens - num_hit, budget)
        before = self.trace()
        blocks = self.kv.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=computed,
            num_lookahead_tokens=self.setup.num_drafts,
            full_sequence_must_fit=True,
        )
        if blocks is None:
            assert self.trace() == before, "a refused admission left a trace"
            self.num_refusals += 1
            return None
        self.state.on_admitted(request, self.kv.get_blocks(request.request_id))
        request.num_computed_tokens = num_hit
        life.prefill_end = request.num_tokens
        self.num_hit_tokens += num_hit
        return life, True, num_tokens, (list(request.all_token_ids), num_hit)

    def trace(self):
        return (
            self.state.ledger.levels(),
            self.state.pages.room(),
            [len(manager.req_to_blocks) for manager in self.kv.coordinator.single_type_managers],
        )

    def finish_schedule(self, works):
        ids = {life.request.request_id: num_tokens for life, _, num_tokens, _ in works}
        self.state.bind_scheduled(SimpleNamespace(num_scheduled_tokens=ids))
        messages = []
        for life, is_prefill, num_tokens, prompt in works:
            request = life.request
            tables = self.kv.get_block_ids(request.request_id)
            messages.append(
                Work(
                    request.request_id,
                    life.epoch,
                    is_prefill,
                    num_tokens,
                    prompt,
                    [tables[m.kv_cache_group_id] for m in self.state._latent],
                    tables[self.state._address.kv_cache_group_id],
                )
            )
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens
            life.steps_in_flight += 1
        self.in_flight.append((self.state.take_commands(), works, messages))
        self.num_scheduled += 1
        while len(self.in_flight) > self.setup.lag:
            self.update()

    def update(self):
        """Process the output of the oldest step in flight, if any."""
        if not self.in_flight:
            return
        commands, works, messages = self.in_flight.popleft()
        self.num_updated += 1
        assert commands.step == self.num_updated
        results = self.worker.step(commands.commands, messages)
        while self.deferred and self.deferred[0][0] <= self.num_updated:
            self.pool.free_blocks(reversed(self.deferred.popleft()[1]))
        for (life, is_prefill, num_tokens, _), message in zip(works, messages, strict=True):
            if life.epoch != message.epoch:
                continue
            request = life.request
            new_tokens = results[request.request_id]
            life.steps_in_flight -= 1
            request.num_in_flight_tokens -= num_tokens
            if not is_prefill:
                request.num_computed_tokens -= num_tokens - len(new_tokens)
            for token in new_tokens:
                request.append_output_token_ids(token)
            if request.num_output_tokens >= life.max_tokens:
                self.end(life)

    def end(self, life):
        """Finish or abort."""
        self.free(life)
        if life in self.running:
            self.running.remove(life)
        else:
            self.waiting.remove(life)

    def free(self, life):
        life.epoch += 1
        if self.setup.defers_frees and life.steps_in_flight:
            blocks = self.kv.pop_blocks_for_free(life.request)
            self.deferred.append((self.num_scheduled, blocks))
        else:
            self.kv.free(life.request)
        life.steps_in_flight = 0

    def preempt(self, life):
        self.running.remove(life)
        self.free(life)
        life.request.num_computed_tokens = life.request.num_in_flight_tokens = 0
        self.waiting.appendleft(life)
        self.num_preemptions += 1

    def abort(self, index):
        lives = [*self.running, *self.waiting]
        if lives:
            self.end(lives[index % len(lives)])

    def reset_prefix_cache(self):
        while self.running:
            self.preempt(self.running[-1])
        while self.deferred:
            assert self.in_flight, "a deferred free waits for no step"
            self.update()
        assert self.kv.reset_prefix_cache()
        levels = self.state.ledger.levels()
        assert levels == (self.setup.num_blocks - 1, 0, 0, 0)
        assert self.state.pages.num_free == self.setup.num_pages
        assert not self.pool._reuse_watchers

    def set_base_units(self, base_units):
        more = (base_units - self.state.ledger.base_units) * len(self.running)
        if more * self.setup.num_groups <= self.pool.get_num_free_blocks():
            self.state.ledger.set_base_units(base_units)

    def adopt(self, num_units, head_reserve_blocks, take_cached):
        if self.setup.residency == "adaptive":
            self.state.ledger.adopt(num_units, head_reserve_blocks, take_cached)

    def evict_prefixes(self, seed):
        """Someone else evicts cached blocks, in use or not."""
        blocks = random.Random(seed).sample(range(1, self.setup.num_blocks), 10)
        self.pool.evict_blocks(set(blocks))

    def check(self):
        self.state.check_integrity(b.block_id for _, blocks in self.deferred for b in blocks)
        tails = self.state.ledger._tails.values()
        assert all(len(tail) <= self.state.max_tail_blocks for tail in tails)
        if not self.setup.defers_frees:
            idle = self.state.pages._idle
            queue = [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]
            assert list(idle) == [block for block in queue if block in idle], "eviction order"

    def close(self):
        """End everything: all blocks and pages come back."""
        while self.running or self.waiting:
            self.abort(0)
        while self.in_flight:
            self.update()
        self.check()
        self.reset_prefix_cache()
        self.check()
