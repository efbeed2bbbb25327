"""One script of requests for two residencies, on vLLM's real KVCacheManager without an engine.

Two long requests run all the time. Others come, are prefilled and decode until the pool is
full; one more comes at that moment. Then all but the two end, and the two decode on. Both
have the same blocks: four groups of latent pages, one of indexer pages, 16 tokens each.
Every request has 8 pages of cache in each latent group once it reads from the host.
"""

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.kv_cache_interface import (
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)
from vllm.v1.request import Request

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.integration.adaptation import controller_for
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import register_latent_spec
from vllm_dhisparse.integration.scheduler_state import SchedulerState

BLOCK_TOKENS = 16
NUM_BLOCKS = 600
HOST_BLOCKS = 2048
LATENT_GROUPS = 4
CACHE_BLOCKS = 8
CHUNK_TOKENS = 256
IN_FLIGHT_TOKENS = 512  # prompts are shorter, as they are on a server with large chunks
PROMPT_TOKENS = 320
LONG_REQUESTS = 2
LOW_STEPS = 40
OTHER_REQUESTS = 3
OTHER_STEPS = 4
HIGH_STEPS = 100
IDLE_STEPS = 60
MAX_MODEL_LEN = 4096


class Outcome(NamedTuple):
    """What the script showed.

    ``resident_rows``: rows of the two requests' history that are on the device as whole pages;
    ``history_rows``: of how many; ``cache_rows``: places for single rows that are read, on
    top: what the requests that run have for themselves or share. Each at three times: right
    before the load drops, right after, and 60 steps later.
    ``free_blocks``: when the last request came. ``waited_steps``: of that one; 0 = admitted
    at once.
    ``preemptions``: in the whole script.
    """

    resident_rows: tuple[int, int, int]
    history_rows: tuple[int, int, int]
    cache_rows: tuple[int, int, int]
    free_blocks: int
    waited_steps: int
    preemptions: int


class Scheduler:
    """vLLM's order of things in a step: running requests first, then those that wait."""

    def __init__(self, latent_groups: Sequence[KVCacheGroupSpec], **config: Any) -> None:
        init_none_hash(sha256)
        indexer = KVCacheGroupSpec(
            ["indexer"],
            _mla_spec(132, SparseCacheRole.INDEXER),
            role=KVCacheGroupRole.HISPARSE_INDEXER if config else KVCacheGroupRole.DEFAULT,
        )
        self.kv = KVCacheManager(
            KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                kv_cache_tensors=[],
                kv_cache_groups=[latent_groups[0], indexer, *latent_groups[1:]],
                **config,
            ),
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=IN_FLIGHT_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_requests = 0
        self.preemptions = 0

    def add(self) -> Request:
        tokens = [1000 * self.num_requests + i for i in range(PROMPT_TOKENS)]
        request = Request(
            request_id=f"request-{self.num_requests}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.num_requests += 1
        self.waiting.append(request)
        return request

    def step(self) -> None:
        scheduled: dict[str, int] = {}
        budget, may_admit = CHUNK_TOKENS, True
        for request in list(self.running):
            while budget and request in self.running:
                tokens = min(budget, request.num_tokens - request.num_computed_tokens)
                if self.kv.allocate_slots(request, tokens):
                    scheduled[request.request_id] = tokens
                    budget -= tokens
                    break
                may_admit = False
                self.preempt(self.running[-1], scheduled)
        while self.waiting and may_admit and budget:
            request = self.waiting[0]
            computed, num_hit, *_ = self.kv.get_computed_blocks(request)
            self.consider(request, num_hit)
            tokens = min(budget, request.num_tokens - num_hit)
            blocks = self.kv.allocate_slots(
                request,
                tokens,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=computed,
                full_sequence_must_fit=True,
            )
            if blocks is None:
                break
            self.waiting.popleft()
            request.num_computed_tokens = num_hit
            self.running.append(request)
            self.admitted(request)
            scheduled[request.request_id] = tokens
            budget -= tokens
        self.end_step(scheduled)
        for request in self.running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(1)

    def preempt(self, request: Request, scheduled: dict[str, int]) -> None:
        self.preemptions += 1
        self.running.remove(request)
        scheduled.pop(request.request_id, None)
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def finish(self, request: Request) -> None:
        (self.waiting if request in self.waiting else self.running).remove(request)
        self.kv.free(request)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def look(self, requests: Sequence[Request]) -> tuple[int, int, int]:
        """Return rows on the device, rows of history and rows of cache."""
        resident = sum(map(self.resident_rows, requests))
        history = sum(request.num_computed_tokens for request in requests)
        return resident, history, self.cache_rows()

    def consider(self, request: Request, num_hit: int) -> None:
        pass

    def admitted(self, request: Request) -> None:
        pass

    def end_step(self, scheduled: dict[str, int]) -> None:
        raise NotImplementedError

    def resident_rows(self, request: Request) -> int:
        raise NotImplementedError

    def cache_rows(self) -> int:
        raise NotImplementedError


class HiSparse(Scheduler):
    """vLLM's own coordinator, with a worker that does each step's copies in that step."""

    def __init__(self) -> None:
        page = _mla_spec(576, SparseCacheRole.SPARSE).page_size_bytes
        resident = HiSparseResidentSpec(block_size=BLOCK_TOKENS, page_size=page)
        hot = HiSparseHotSpec(
            block_size=BLOCK_TOKENS, page_size=page, blocks_per_request=CACHE_BLOCKS
        )
        super().__init__(
            [
                KVCacheGroupSpec(
                    ["latent"],
                    _mla_spec(576, SparseCacheRole.SPARSE),
                    role=KVCacheGroupRole.HISPARSE_SOURCE,
                    host_resident=True,
                ),
                *(
                    KVCacheGroupSpec([f"latent.{kind}.{group}"], spec, enable_kv_transfer=False)
                    for kind, spec in (("resident", resident), ("hot", hot))
                    for group in range(LATENT_GROUPS)
                ),
            ],
            hisparse_host_num_blocks=HOST_BLOCKS,
        )
        self.coordinator = get_hisparse_coordinator(self.kv)

    def end_step(self, scheduled: dict[str, int]) -> None:
        self.coordinator.advance_scheduled(
            (r.request_id, r.num_computed_tokens + scheduled[r.request_id])
            for r in self.running
            if r.request_id in scheduled
        )
        command = self.coordinator.build_offload_command()
        assert command is not None
        self.coordinator.take_residency_updates(scheduled)
        done = {transfer.transfer_id: 1 for transfer in command.page_transfers}
        self.coordinator.update_spills(done, done)

    def resident_rows(self, request: Request) -> int:
        manager = self.coordinator.resident_managers[0]  # a page is lost in all groups
        pages = -(-request.num_computed_tokens // BLOCK_TOKENS)
        held = sum(
            manager.get_resident_page(request.request_id, page) is not None for page in range(pages)
        )
        return min(held * BLOCK_TOKENS, request.num_computed_tokens)

    def cache_rows(self) -> int:
        manager = self.coordinator.hot_managers[0]
        blocks = sum(len(manager.req_to_blocks.get(r.request_id, ())) for r in self.running)
        return blocks * BLOCK_TOKENS


class Adaptive(Scheduler):
    """The ledger and the controller of this package."""

    def __init__(self) -> None:
        register_latent_spec()
        spec = DHiSparseLatentSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=576,
            dtype=torch.bfloat16,
            base_units_per_request=CACHE_BLOCKS,
        )
        super().__init__(
            [KVCacheGroupSpec([f"latent.{group}"], spec) for group in range(LATENT_GROUPS)]
        )
        self.state = SchedulerState(self.kv, HOST_BLOCKS, "adaptive", IN_FLIGHT_TOKENS, 0)
        controller = controller_for(
            DHiSparseConfig(),
            SimpleNamespace(
                scheduler_config=SimpleNamespace(
                    max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=8
                )
            ),
            self.state,
        )
        self.residency = self.state.residency(controller)

    def consider(self, request: Request, num_hit: int) -> None:
        self.state.on_new_request(request, num_hit)

    def admitted(self, request: Request) -> None:
        self.state.on_admitted(request, self.kv.get_blocks(request.request_id))

    def end_step(self, scheduled: dict[str, int]) -> None:
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_spec_tokens_to_schedule=0,
        )
        self.state.bind_scheduled(output)
        growth_blocks = self.state.growth_blocks(output.total_num_scheduled_tokens)
        self.residency.adapt(self.state.waiting_blocks, growth_blocks, fetched_rows=0)
        self.state.take_commands()

    def resident_rows(self, request: Request) -> int:
        ledger = self.state.ledger
        tail = set(ledger._tails[request.request_id])
        held = len(ledger.spans.positions(request.request_id) | tail)
        return min(held * BLOCK_TOKENS, request.num_computed_tokens)

    def cache_rows(self) -> int:
        ledger, levels = self.state.ledger, self.state.ledger.levels()
        places = levels.required_units + levels.optional_units - len(ledger.spans)
        return places * BLOCK_TOKENS


def play(make: Callable[[], Scheduler]) -> Outcome:
    """Run the script."""
    scheduler = make()
    long = [scheduler.add() for _ in range(LONG_REQUESTS)]
    scheduler.steps(LOW_STEPS)
    for _ in range(OTHER_REQUESTS):
        scheduler.add()
    scheduler.steps(OTHER_STEPS)
    assert not scheduler.waiting
    last = scheduler.add()
    free = scheduler.kv.block_pool.get_num_free_blocks()
    scheduler.step()
    waited = 0
    while last in scheduler.waiting:
        scheduler.step()
        waited += 1
    scheduler.steps(HIGH_STEPS - waited)
    looks = [scheduler.look(long)]
    for request in [*scheduler.running, *scheduler.waiting]:
        if request not in long:
            scheduler.finish(request)
    scheduler.step()
    looks.append(scheduler.look(long))
    scheduler.steps(IDLE_STEPS)
    looks.append(scheduler.look(long))
    resident, history, cache = zip(*looks, strict=True)
    return Outcome(resident, history, cache, free, waited, scheduler.preemptions)


def _mla_spec(head_size: int, role: SparseCacheRole) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=head_size,
        dtype=torch.uint8 if role is SparseCacheRole.INDEXER else torch.bfloat16,
        cache_role=role,
    )
