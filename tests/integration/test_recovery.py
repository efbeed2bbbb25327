"""History comes back after a load, also where ended requests have left the memory full.

vLLM's real KVCacheManager, the ledger and the controller, without a model.
"""

from collections import deque
from types import SimpleNamespace

from vllm_dhisparse.core.commands import SpanRestored
from vllm_dhisparse.core.controller import ResidencyController

from .kv_setup import MAX_CHUNK, Setup, make_kv_cache_manager, make_request, make_state

GROUPS, BLOCK_TOKENS, PAGE_TOKENS = 2, 64, 128
FETCHED_ROWS = 40


class Engine:
    def __init__(self, num_blocks):
        setup = Setup(
            num_blocks=num_blocks,
            num_pages=num_blocks,
            block_tokens=BLOCK_TOKENS,
            page_tokens=PAGE_TOKENS,
            num_groups=GROUPS,
            base_units=1,
            num_drafts=0,
            lag=0,
        )
        self.kv = make_kv_cache_manager(setup)
        self.state = make_state(self.kv, setup)
        controller = ResidencyController(head_reserve_blocks=4 * GROUPS)
        self.residency = self.state.residency(controller)
        self.waiting, self.running, self.max_tokens = deque(), [], {}
        self.restored = []

    def add(self, request_id, tokens, max_tokens):
        self.waiting.append(make_request(request_id, tokens))
        self.max_tokens[request_id] = max_tokens

    def step(self):
        self.kv.new_step_starts()
        scheduled, left = {}, MAX_CHUNK
        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, left)
            if count:
                assert self.kv.allocate_slots(request, count), "required memory fits here"
                scheduled[request.request_id] = count
                left -= count
        while self.waiting and left:
            request = self.waiting[0]
            computed, num_hit, *_ = self.kv.get_computed_blocks(request)
            self.state.on_new_request(request, num_hit)
            count = min(request.num_tokens - num_hit, left)
            blocks = self.kv.allocate_slots(
                request,
                count,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=computed,
                full_sequence_must_fit=True,
            )
            if blocks is None:
                break
            self.state.on_admitted(request, self.kv.get_blocks(request.request_id))
            request.num_computed_tokens = num_hit
            self.running.append(self.waiting.popleft())
            scheduled[request.request_id] = count
            left -= count
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_spec_tokens_to_schedule=0,
        )
        self.state.bind_scheduled(output)
        growth_blocks = self.state.growth_blocks(output.total_num_scheduled_tokens)
        self.residency.adapt(self.state.waiting_blocks, growth_blocks, FETCHED_ROWS)
        commands = self.state.take_commands().commands
        self.restored += [c for c in commands if isinstance(c, SpanRestored)]
        self.state.check_integrity()
        for request in list(self.running):
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(1)
            if request.num_output_tokens >= self.max_tokens[request.request_id]:
                self.running.remove(request)
                self.kv.free(request)

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def run_until(self, num_running):
        while len(self.running) > num_running or self.waiting:
            self.step()


def tokens(number, count):
    return [100 * number + i % 90 for i in range(count)]


def test_units_of_ended_requests_give_way_to_history_of_running_ones():
    """The free blocks are cached prefixes by then, and optional units of requests that ended."""
    engine = Engine(num_blocks=330)
    for number in range(2):
        engine.add(f"long-{number}", tokens(number, 1300), 2000)
    engine.run(60)
    missing = engine.state.missing
    assert len(missing) == 0
    for number in range(2, 12):
        engine.add(f"short-{number}", tokens(number, 1300), 120)
    most = 0
    while len(engine.running) > 2 or engine.waiting:
        engine.step()
        most = max(most, len(missing))
    assert most > 60, "the load took nothing"
    engine.run(40)
    assert len(missing) == 0
    assert engine.state.ledger.optional.num_ended > 0, "more than necessary was emptied"
