"""Drafts get shorter before a request is refused or preempted for want of blocks."""

import random
from types import SimpleNamespace

import pytest

from vllm_dhisparse.integration.draft_lengths import DraftLengths

from .kv_setup import Setup, make_kv_cache_manager, make_request, make_state

DRAFTS = 3


class Steps:
    """Allocation as vLLM's scheduler does it: the running requests first, then one that waits."""

    def __init__(self, **setup):
        self.setup = Setup(num_groups=2, num_drafts=DRAFTS, **setup)
        self.manager = make_kv_cache_manager(self.setup)
        self.state = make_state(self.manager, self.setup)
        self.pool = self.manager.block_pool
        self.running = []

    def allocate(self, request, num_tokens, hit=()):
        return self.manager.allocate_slots(
            request, num_tokens, *hit, num_lookahead_tokens=DRAFTS, full_sequence_must_fit=bool(hit)
        )

    def admit(self, request):
        """Return whether a new request fits, with its whole prompt."""
        blocks, num_hit = self.manager.get_computed_blocks(request)[:2]
        self.state.on_new_request(request, num_hit)
        if self.allocate(request, request.num_tokens - num_hit, (num_hit, blocks)) is None:
            return False
        self.state.on_admitted(request, self.manager.get_blocks(request.request_id))
        request.num_computed_tokens = num_hit
        self.running.append(request)
        return True

    def step(self, waiting=None):
        """Schedule everything; return the running requests' drafts and whether one was let in."""
        self.manager.new_step_starts()
        drafts = {}
        for request in self.running:
            new = request.num_tokens_with_spec - request.num_computed_tokens
            assert self.allocate(request, new) is not None, "a request would be preempted"
            drafts[request.request_id] = len(request.spec_token_ids)
        is_let_in = waiting is not None and self.admit(waiting)
        names = [request.request_id for request in self.running]
        self.state.bind_scheduled(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)))
        self.state.take_commands()
        return drafts, is_let_in

    def answer(self, accepted=0):
        """Let each running request accept so many drafts and propose new ones."""
        for request in self.running:
            request.num_computed_tokens = request.num_tokens + accepted
            request.append_output_token_ids([5] * (accepted + 1))
            request.spec_token_ids = [-1] * DRAFTS


@pytest.mark.parametrize("cuts", [True, False])
def test_a_waiting_request_is_let_in_beside_a_shorter_draft(monkeypatch, cuts):
    """A block border lies in the running request's next draft; without it all have room."""
    if not cuts:
        monkeypatch.setattr(DraftLengths, "cut", lambda *_: None)
    steps = Steps()
    steps.step(make_request("running", range(24)))
    steps.answer()
    held = steps.pool.get_new_blocks(steps.pool.get_num_free_blocks() - 2)
    waiting = make_request("waiting", range(100, 120))
    assert steps.step(waiting) == ({"running": DRAFTS}, False)
    steps.answer(accepted=DRAFTS)
    steps.pool.free_blocks(held[:4])  # of a request that ended
    assert steps.step(waiting) == (({"running": 0}, True) if cuts else ({"running": 3}, False))
    steps.answer()
    steps.pool.free_blocks(held[4:])
    names = [request.request_id for request in steps.running]
    assert steps.step()[0] == dict.fromkeys(names, DRAFTS), "the room is back"


@pytest.mark.parametrize("residency", ["adaptive", "fixed"])
def test_a_shorter_draft_comes_before_a_preemption(residency):
    """Only `adaptive` shortens drafts; `fixed` is a baseline."""
    steps = Steps(residency=residency)
    steps.step(make_request("running", range(28)))
    steps.answer()
    steps.pool.get_new_blocks(steps.pool.get_num_free_blocks())
    if residency == "adaptive":
        assert steps.step() == ({"running": 0}, False)
    else:
        with pytest.raises(AssertionError, match="preempted"):
            steps.step()


@pytest.mark.parametrize("seed", range(6))
def test_the_growth_foreseen_is_what_vllm_allocates(seed):
    rng = random.Random(seed)
    steps = Steps(num_blocks=600, num_pages=100)
    for number in range(5):
        steps.admit(make_request(str(number), range(rng.randrange(3, 60))))
    managers = steps.manager.coordinator.single_type_managers
    for _ in range(12):
        steps.answer(rng.randrange(DRAFTS + 1))
        kept = rng.randrange(DRAFTS + 1)
        foreseen = steps.state._draft_lengths.growth_blocks(kept)
        for request in steps.running:
            del request.spec_token_ids[kept:]
        before = sum(len(m.req_to_blocks[r.request_id]) for m in managers for r in steps.running)
        steps.step()
        after = sum(len(m.req_to_blocks[r.request_id]) for m in managers for r in steps.running)
        assert after - before == foreseen
        assert foreseen <= steps.state._draft_lengths._most_blocks()
