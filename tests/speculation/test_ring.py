"""Draft rings in an engine: drafts are those of vLLM's own managers, whatever happens.

A ring one row short, unmasked writes of long chunks, ring blocks that are not zeroed: each makes
a test here fail (failure case F51).
"""

import pytest
import torch
from draft_record import (
    assert_same_drafts,
    recorded,
    speculate,
)
from engine import RESIDENT, all_blocks_free, greedy, kv_caches, prompts, running, scheduler
from speculation_settings import speculative_config
from vllm import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_dhisparse.integration.draft_ring import DraftRingManager

# A ring of two blocks of 128 rows, of which 129 rows are needed: one row less is one block.
WINDOW, NUM_DRAFTS = 123, 4
FULL, RING = RESIDENT | {"draft_kv": "full"}, RESIDENT | {"draft_kv": "ring"}


@pytest.fixture(scope="module")
def pair(tiny_pair):
    """A target, and the option for a drafter whose ring is full to the last row but one."""
    model, drafter = tiny_pair(method="dspark", window=WINDOW)
    return model, speculative_config("dspark", drafter, NUM_DRAFTS)


@pytest.fixture
def reversed_writes(monkeypatch):
    """Context rows are written last first: on a GPU the order is open."""
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def last_first(self, layer, key, value, kv_cache, slot_mapping):
        count = len(slot_mapping)
        key, value = key[:count].flip(0).contiguous(), value[:count].flip(0).contiguous()
        return update(self, layer, key, value, kv_cache, slot_mapping.flip(0).contiguous())

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", last_first)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        pytest.param(
            (5, WINDOW, 129, 700),
            {"max_num_batched_tokens": 2048},
            id="chunks longer than the ring",
        ),
        pytest.param((5, 300), {"max_num_batched_tokens": 64}, id="chunks of 64"),
        pytest.param(
            (9, 140),
            {"long_prefill_token_threshold": 1},
            id="chunks of 1",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_drafts_of_a_ring_are_those_of_full_draft_kv(
    pair, monkeypatch, reversed_writes, lengths, options
):
    """F45, F48: prompts and chunks of all sizes; a drafter drafts in mid-prefill too."""
    model, config = pair
    outcomes = [
        speculate(
            monkeypatch,
            model,
            settings,
            lengths,
            12,
            speculative_config=config,
            max_model_len=1024,
            enable_prefix_caching=False,
            **options,
        )
        for settings in (FULL, RING)
    ]
    assert outcomes[0].tokens == outcomes[1].tokens
    assert_same_drafts(outcomes[0].drafts, outcomes[1].drafts)
    if max(lengths) > 256:
        assert outcomes[1].counters["vllm:dhisparse_draft_ring_wraps{}"] > 0


def test_rows_that_were_never_written_are_zero(pair, monkeypatch):
    """F49: all memory is NaN at first, and ring blocks come from other layers' hands."""
    model, config = pair
    options = {"speculative_config": config, "max_model_len": 1024, "max_num_seqs": 4}
    lengths = (5, 90, 300)
    reference = speculate(monkeypatch, model, FULL, lengths, 8, **options)
    settings = {"residency": "fixed"}
    options["num_gpu_blocks_override"] = 60
    with recorded(monkeypatch) as record, running(model, settings, **options) as llm:
        for _ in range(2):
            for cache in kv_caches(llm):
                cache.fill_(float("nan"))
            assert greedy(llm, prompts(*lengths), 8) == reference.tokens
            assert_same_drafts(record.take(), reference.drafts)
            assert llm.reset_prefix_cache()


def test_drafts_behind_a_prefix_hit(tiny_pair, monkeypatch):
    """F47: a tail as long as the window drafts as ever; a shorter one without the hit's rows.

    With a drafter vLLM leaves out the last block of 128 tokens of a hit.
    """
    model, drafter = tiny_pair(method="dspark", window=200)
    config = speculative_config("dspark", drafter, NUM_DRAFTS)
    (shared,) = prompts(256)
    short, long = (shared + tail for tail in prompts(30, 200, seed=3))
    options = {"speculative_config": config, "max_model_len": 1024}
    with recorded(monkeypatch) as record, running(model, RING, **options) as llm:
        greedy(llm, [[*shared, 5]], 1)
        record.take()
        tokens, drafts = [], []
        for prompt in (short, long):
            tokens += greedy(llm, [prompt], 8)
            drafts.append(record.take()[0])
        hits = llm.get_metrics()
    assert sum(m.value for m in hits if m.name == "vllm:prefix_cache_hits") == 2 * 128

    options["enable_prefix_caching"] = False
    with recorded(monkeypatch) as record, running(model, RING, **options) as llm:
        assert greedy(llm, [short], 8) == tokens[:1]
        with_all_rows = record.take()[0]
        assert greedy(llm, [long], 8) == tokens[1:]
        assert_close_drafts(drafts[1], record.take()[0])
        start_behind(monkeypatch, 128)
        assert greedy(llm, [short], 8) == tokens[:1]
        assert_close_drafts(drafts[0], record.take()[0])
    assert not torch.allclose(drafts[0][0].hidden, with_all_rows[0].hidden, atol=1e-3)


def assert_close_drafts(one, other):
    """Equal proposals; the states may differ in the last bits, as batches had other shapes."""
    assert [(d.position, d.tokens) for d in one] == [(d.position, d.tokens) for d in other]
    for draft, twin in zip(one, other, strict=True):
        torch.testing.assert_close(draft.hidden, twin.hidden, rtol=1e-3, atol=1e-4)


def start_behind(monkeypatch, num_tokens):
    """Let the drafter have no rows below ``num_tokens``, though the target computes them."""
    allocate = DraftRingManager.allocate_new_blocks

    def with_null_head(self, request_id, *args):
        if request_id not in self._rings:
            self._num_null[request_id] = num_tokens // self.block_size
            self.req_to_blocks[request_id] = [self._null_block] * self._num_null[request_id]
        return allocate(self, request_id, *args)

    monkeypatch.setattr(DraftRingManager, "allocate_new_blocks", with_null_head)


def test_drafts_after_a_preemption(pair, monkeypatch):
    """F46."""
    model, config = pair
    options = {
        "speculative_config": config,
        "max_model_len": 256,
        "enable_prefix_caching": False,
    }
    lengths = (100, 98, 102, 96)  # each grows by four blocks at 128 tokens
    calm = speculate(monkeypatch, model, RING, lengths, 44, **options)
    tight = speculate(monkeypatch, model, RING, lengths, 44, num_gpu_blocks_override=46, **options)
    assert tight.counters.get("vllm:num_preemptions{}", 0) > 0
    assert tight.tokens == calm.tokens
    common = 0
    for request, drafts in tight.drafts.items():
        known = {draft.position: draft.tokens for draft in calm.drafts[request]}
        for draft in drafts:
            if draft.position in known:
                assert draft.tokens == known[draft.position], (request, draft.position)
                common += 1
    assert common > 20


def test_an_abort_while_drafts_are_verified_returns_the_ring(pair):
    model, config = pair
    settings = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with running(
        model, {"residency": "adaptive"}, speculative_config=config, max_model_len=512
    ) as llm:
        engine, (ring,) = llm.llm_engine, scheduler(llm).connector.scheduler.rings
        for number, prompt in enumerate(prompts(40, 150, 300)):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)
        for _ in range(4):
            engine.step()
        assert ring.num_rings == 3
        engine.abort_request(["1"])
        assert ring.num_rings == 2
        while engine.has_unfinished_requests():
            engine.step()
        assert ring.num_rings == 0
        assert all_blocks_free(llm)


def test_the_end_of_the_longest_context(pair, monkeypatch):
    """F50. Where queries would pass the end, vLLM clamps their positions, which moves their
    window back. The last draft of each run sees the oldest row that a ring must hold.
    """
    model, config = pair
    max_model_len = 320
    options = {"speculative_config": config, "max_model_len": max_model_len}
    outcomes = []
    for settings in (FULL, RING):
        with recorded(monkeypatch) as record, running(model, settings, **options) as llm:
            for length, max_tokens in [(290, 30), (318, 2)]:
                tokens = greedy(llm, prompts(length), max_tokens)
                assert len(tokens[0]) == max_tokens
                outcomes.append((tokens, record.take()))
    for (tokens, drafts), (of_ring, ring_drafts) in zip(outcomes[:2], outcomes[2:], strict=True):
        assert of_ring == tokens
        assert ring_drafts[0][-1].position == max_model_len - 1
        assert_same_drafts(ring_drafts, drafts)


def test_a_drafter_of_windowed_and_full_layers(tiny_pair, monkeypatch):
    model, drafter = tiny_pair(method="dflash2", window=40, full_layers=1)
    config = speculative_config("dflash2", drafter, NUM_DRAFTS)
    options = {"speculative_config": config, "max_model_len": 1024}
    full = speculate(monkeypatch, model, FULL, (20, 400), 12, **options)
    settings = {"residency": "fixed"}
    with recorded(monkeypatch) as record, running(model, settings, **options) as llm:
        managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
        kinds = [type(manager).__name__ for manager in managers]
        assert kinds.count("DraftRingManager") == 1
        assert greedy(llm, prompts(20, 400), 12) == full.tokens
        assert_same_drafts(record.take(), full.drafts)


def test_draft_pages_with_padding_in_bfloat16(tiny_pair, monkeypatch):
    """Three heads do not fill a page; states are equal, since both engines run equal batches."""
    target = {"dtype": "bfloat16"}
    model, drafter = tiny_pair(target, method="dspark", window=40, key_value_heads=3)
    config = speculative_config("dspark", drafter, NUM_DRAFTS)
    options = {"speculative_config": config, "max_model_len": 1024, "dtype": "bfloat16"}
    full = speculate(monkeypatch, model, FULL, (20, 300), 12, **options)
    with recorded(monkeypatch) as record, running(model, RING, **options) as llm:
        (ring,) = scheduler(llm).connector.scheduler.rings
        spec = ring.kv_cache_spec
        assert spec.page_size_padded == spec.page_size_bytes > spec.real_page_size_bytes
        assert greedy(llm, prompts(20, 300), 12) == full.tokens
        assert_same_drafts(record.take(), full.drafts)
    assert sum(full.accepted) > 0


def test_an_imposed_window_is_the_window_of_a_drafter_that_has_it(tiny_pair, monkeypatch):
    model, everything = tiny_pair(method="dspark", window=0)
    _, windowed = tiny_pair(method="dspark", window=40)
    outcomes = []
    for drafter, more in [(windowed, {}), (everything, {"draft_window_tokens": 40})]:
        config = speculative_config("dspark", drafter, NUM_DRAFTS)
        settings = {"residency": "fixed"} | more
        options = {"speculative_config": config, "max_model_len": 1024}
        outcomes.append(speculate(monkeypatch, model, settings, (20, 300), 12, **options))
    assert outcomes[0].tokens == outcomes[1].tokens
    assert_same_drafts(outcomes[0].drafts, outcomes[1].drafts)
    config = speculative_config("dspark", everything, NUM_DRAFTS)
    unbound = speculate(
        monkeypatch, model, FULL, (20, 300), 12, speculative_config=config, max_model_len=1024
    )
    assert unbound.tokens == outcomes[0].tokens
    hidden = [outcome.drafts[1][0].hidden for outcome in (unbound, outcomes[1])]
    assert not torch.allclose(*hidden, atol=1e-3)
