"""Where memory is short, drafts get shorter, and the tokens stay those of no speculation."""

from engine import RESIDENT, counters, greedy, prompts, running
from speculation_settings import speculative_config

from vllm_dhisparse.integration.connector import DHiSparseConnector

NUM_DRAFTS = 7
LENGTHS = (60, 50, 110, 30, 100, 55, 118, 40)


def test_short_memory_shortens_drafts_and_changes_no_token(tiny_pair, monkeypatch):
    model, drafter = tiny_pair(method="dspark", window=40)
    options = {"max_model_len": 256, "max_num_batched_tokens": 128}
    with running(model, RESIDENT, **options) as llm:
        expected = greedy(llm, prompts(*LENGTHS), 24)
    steps = []
    build = DHiSparseConnector.build_connector_meta

    def noting(connector, scheduler_output):
        limit = connector.scheduler.state.draft_tokens
        steps.append(
            (limit, [len(d) for d in scheduler_output.scheduled_spec_decode_tokens.values()])
        )
        return build(connector, scheduler_output)

    monkeypatch.setattr(DHiSparseConnector, "build_connector_meta", noting)
    options["speculative_config"] = speculative_config("dspark", drafter, NUM_DRAFTS)
    options["num_gpu_blocks_override"] = 30  # three or four of the requests at a time
    with running(model, {"residency": "adaptive", "head_reserve_blocks": 0}, **options) as llm:
        assert greedy(llm, prompts(*LENGTHS), 24) == expected
        found = counters(llm)
    assert all(length <= limit for limit, lengths in steps for length in lengths)
    assert any(limit < NUM_DRAFTS for limit, _ in steps)
    scheduled = [length for _, lengths in steps for length in lengths]
    assert max(scheduled) == NUM_DRAFTS
    assert found["vllm:spec_decode_num_draft_tokens{}"] <= sum(scheduled)
