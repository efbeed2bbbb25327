"""What a real engine records: the selections of every request, whatever the residency."""

import numpy as np
import pytest
from engine import counters, greedy, prompts, running

from vllm_dhisparse.core.traces import read_trace

LENGTHS, TOKENS, TOP_K, LEADERS = (300, 150, 200), 24, 64, 2


@pytest.fixture(scope="module")
def recorded(tiny_dsa, tmp_path_factory):
    """By residency: traces in order of the prompts' lengths, and selected rows as counted."""
    model = tiny_dsa(layers=4, leaders=LEADERS, index_topk=TOP_K)
    found = {}
    for residency in ("resident", "adaptive"):
        folder = tmp_path_factory.mktemp("traces") / residency
        settings = {"residency": residency, "record_traces": str(folder)}
        with running(model, settings, max_model_len=1024) as llm:
            greedy(llm, prompts(*LENGTHS), TOKENS)
            names = counters(llm).items()
            decoded = sum(v for k, v in names if "selected_rows" in k and "decode" in k)
            greedy(llm, prompts(100, seed=1), 2)  # a later step tells who has ended
        traces = [read_trace(file) for file in folder.glob("*.npz")]
        found[residency] = sorted(traces, key=lambda trace: -trace.context[0]), decoded
    return found


def test_every_request_has_a_trace_of_all_its_steps(recorded):
    for traces, _ in recorded.values():
        starts = [int(trace.context[0]) for trace in traces]
        assert starts == [*sorted(LENGTHS, reverse=True), 100]
        for start, trace in zip(starts[:3], traces, strict=False):
            steps = TOKENS - 1  # the first token comes from the prompt
            assert trace.positions.shape == (steps, LEADERS, 1, TOP_K)
            assert trace.context.tolist() == list(range(start, start + steps))
            assert trace.accepted.tolist() == [1] * steps
            assert trace.meta["source"] == "recorded while serving"
            assert all(np.unique(row).size == TOP_K for row in trace.positions.reshape(-1, TOP_K))


def test_rows_are_those_that_the_engine_counted(recorded):
    for traces, decoded in recorded.values():
        rows = sum((trace.positions >= 0).sum() for trace in traces[:3])
        assert rows == decoded


def test_residency_does_not_change_a_selection(recorded):
    for one, other in zip(recorded["resident"][0], recorded["adaptive"][0], strict=True):
        assert np.array_equal(np.sort(one.positions), np.sort(other.positions))


def test_drafts_are_queries_of_one_step(tiny_dsa, tmp_path):
    model = tiny_dsa(layers=4, leaders=LEADERS, index_topk=TOP_K)
    drafts = {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    settings = {"record_traces": str(tmp_path)}
    with running(model, settings, max_model_len=1024, speculative_config=drafts) as llm:
        greedy(llm, [prompts(80)[0] * 3], 60)
    (trace,) = [read_trace(file) for file in tmp_path.glob("*.npz")]
    assert trace.positions.shape[1:] == (LEADERS, 4, TOP_K)
    assert int(trace.context[0]) == 240
    assert trace.accepted.max() > 1, "no draft was ever right"
    assert 240 + trace.accepted[:-1].sum() == trace.context[-1]
