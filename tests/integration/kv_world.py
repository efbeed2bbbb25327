"""A small scheduler on vLLM's real KVCacheManager, with a worker that runs steps late."""

import random
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

from base_units import set_base_units
from vllm.v1.request import Request

from vllm_dhisparse.runtime.tables import NO_PAGE

from .kv_setup import MAX_CHUNK, make_kv_cache_manager, make_request, make_state
from .model_worker import Message, ModelWorker, Work


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
        self.latent = [manager.kv_cache_group_id for manager in self.state.latent]
        num_groups = setup.num_groups + setup.num_indexer_groups
        self.indexer = [group for group in range(num_groups) if group not in self.latent]
        assert self.indexer[0] == self.state._address.kv_cache_group_id
        self.worker = ModelWorker(setup)
        self.prompts = random.Random(setup.seed)
        self.prefixes = [self.tokens(self.prompts.randrange(64, 400)) for _ in range(4)]
        self.waiting = deque()
        self.running = []
        self.in_flight = deque()
        self.deferred = deque()
        self.num_scheduled = self.num_updated = self.num_requests = 0
        self.events = Counter()

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
            self.events["refused"] += 1
            return None
        self.state.on_admitted(request, self.kv.get_blocks(request.request_id))
        request.num_computed_tokens = num_hit
        life.prefill_end = request.num_tokens
        self.events["hit tokens"] += num_hit
        self.events["resumed"] += life.epoch > 0
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
        sent = []
        for life, is_prefill, num_tokens, prompt in works:
            request = life.request
            tables = self.kv.get_block_ids(request.request_id)
            sent.append(
                Work(
                    request.request_id,
                    life.epoch,
                    is_prefill,
                    num_tokens,
                    prompt,
                    [tables[group] for group in self.latent],
                    [tables[group] for group in self.indexer],
                )
            )
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens
            life.steps_in_flight += 1
        self.events["out of pages"] += not self.state.pages.num_free
        pages = [self.state.pages.page_of(block) for block in range(self.setup.num_blocks)]
        message = Message(
            self.state.take_commands(),
            sent,
            self.state.ledger.blocks_by_state(),
            [NO_PAGE if page is None else page for page in pages],
        )
        self.in_flight.append((message, [life for life, *_ in works]))
        self.num_scheduled += 1
        while len(self.in_flight) > self.setup.lag:
            self.update()

    def update(self):
        """Process the output of the oldest step in flight, if any."""
        if not self.in_flight:
            return
        message, lives = self.in_flight.popleft()
        assert message.commands.step == self.num_updated
        self.num_updated += 1
        results = self.worker.step(message)
        while self.deferred and self.deferred[0][0] <= self.num_updated:
            self.pool.free_blocks(reversed(self.deferred.popleft()[1]))
        for life, work in zip(lives, message.works, strict=True):
            if life.epoch != work.epoch:
                continue
            request = life.request
            new_tokens = results[request.request_id]
            life.steps_in_flight -= 1
            request.num_in_flight_tokens -= work.num_tokens
            if not work.is_prefill:
                request.num_computed_tokens -= work.num_tokens - len(new_tokens)
            for token in new_tokens:
                request.append_output_token_ids(token)
            if request.num_output_tokens >= life.max_tokens:
                self.events["finished"] += 1
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
        self.events["preempted"] += 1

    def preempt_any(self, index):
        if self.running:
            self.preempt(self.running[index % len(self.running)])

    def abort(self, index):
        lives = [*self.running, *self.waiting]
        if lives:
            life = lives[index % len(lives)]
            self.events["aborted in flight"] += life.steps_in_flight > 0
            self.end(life)

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
        with suppress(ValueError):  # too few blocks are free
            set_base_units(self.state.ledger, base_units)

    def adopt(self, num_units, head_reserve_blocks):
        if self.setup.residency == "adaptive":
            adopted = self.state.ledger.optional.adopt(num_units, head_reserve_blocks)
            self.events["adopted"] += len(adopted)

    def evict_prefixes(self, seed):
        """Someone else evicts cached blocks, in use or not."""
        blocks = random.Random(seed).sample(range(1, self.setup.num_blocks), 10)
        self.pool.evict_blocks(set(blocks))

    def reached(self):
        """How often each kind of event happened."""
        return self.events + self.worker.events + self.worker.memory.events

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
        self.reset_prefix_cache()
        self.check()
        self.schedule()  # the last commands
        while self.in_flight:
            self.update()
        self.worker.memory.check_empty()
