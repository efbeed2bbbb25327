"""Law 1: tokens and log-probabilities do not depend on residency.

Every row that reaches attention is compared with its host row on the way, and all
memory is NaN before.
"""

import random

import pytest
from checked import checked
from engine import RESIDENT, counters, greedy, prompts, running
from vllm import SamplingParams

TOP_K = 64
LENGTHS = (1, 2, 63, 64, 65, 127, 129, 300, 900, 2000)


@pytest.fixture(scope="module")
def model(tiny_dsa):
    return tiny_dsa(layers=6, leaders=2, index_topk=TOP_K)


def outputs(llm, token_ids, max_tokens=16, **parameters):
    """Tokens and the log-probabilities of the three likeliest at each place."""
    settings = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=3, ignore_eos=True, **parameters
    )
    answers = llm.generate(
        [{"prompt_token_ids": ids} for ids in token_ids], settings, use_tqdm=False
    )
    return [
        (
            list(answer.outputs[0].token_ids),
            [{t: p.logprob for t, p in place.items()} for place in answer.outputs[0].logprobs],
        )
        for answer in answers
    ]


@pytest.fixture(scope="module")
def resident(model):
    """Outputs of a schedule under residency `resident`, each computed once."""
    known = {}

    def run(scenario, **options):
        key = (scenario.__name__, *sorted(options.items()))
        if key not in known:
            with running(model, RESIDENT, **options) as llm:
                known[key] = scenario(llm)
        return known[key]

    return run


def mixed_lengths(llm):
    return outputs(llm, prompts(*LENGTHS))


@pytest.mark.parametrize("rows", [0, TOP_K, 2 * TOP_K, 8 * TOP_K])
def test_rows_per_request(monkeypatch, model, resident, rows):
    with checked(monkeypatch, model, fixed_rows_per_request=rows) as llm:
        answers = mixed_lengths(llm)
        found = counters(llm)  # another engine in this process would clear them
        fetched = found["vllm:dhisparse_fetched_rows{decode}"]
        assert fetched == found["vllm:dhisparse_selected_rows{decode,host}"]  # no sharing here
        assert ("vllm:dhisparse_selected_rows{decode,required}" in found) == (rows > 0)
    assert answers == resident(mixed_lengths)


@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_chunked_prefill_in_mixed_batches(monkeypatch, model, resident, chunk):
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": 8}
    scenario = short_lengths if chunk == 16 else mixed_lengths
    with checked(monkeypatch, model, **options) as llm:
        answers = scenario(llm)
    assert answers == resident(scenario, **options)


def short_lengths(llm):
    return outputs(llm, prompts(1, 40, 100, 300), 40)


def test_a_long_context(monkeypatch, model, resident):
    options = {"max_model_len": 8400}
    with checked(monkeypatch, model, **options) as llm:
        answers = eight_thousand(llm)
    assert answers == resident(eight_thousand, **options)


def eight_thousand(llm):
    return outputs(llm, prompts(8192, 50), 12)


def test_a_union_beyond_staging_is_served_in_passes(monkeypatch, model, resident):
    with checked(monkeypatch, model, staging_rows=TOP_K) as llm:
        answers = short_lengths(llm)
    assert answers == resident(short_lengths)


def test_the_reference_data_plane(monkeypatch, model, resident):
    # It multiplies in float32 with einsum: equal tokens, not equal bits.
    with checked(monkeypatch, model, data_plane_name="reference", max_model_len=512) as llm:
        tokens = [answer[0] for answer in short_lengths(llm)]
    assert tokens == [answer[0] for answer in resident(short_lengths)]


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "deepseek_v32", "layers": 3},  # every layer is a leader
        {"architecture": "glm_moe_dsa", "layers": 5, "leaders": 2},  # groups of unequal size
        {"architecture": "glm_moe_dsa", "layers": 2, "leaders": 1, "index_topk": 1},
    ],
    ids=["deepseek v3.2", "uneven groups", "top 1"],
)
def test_other_models(monkeypatch, tiny_dsa, shape):
    folder = tiny_dsa(**shape)
    with checked(monkeypatch, folder) as llm:
        answers = short_lengths(llm)
    with running(folder, RESIDENT) as llm:
        assert answers == short_lengths(llm)


def test_bfloat16_rows_equal_their_host_rows(monkeypatch, model):
    with checked(monkeypatch, model, dtype="bfloat16") as llm:
        short_lengths(llm)  # batch shapes change the last bit, so tokens are not compared


def test_ngram_drafts(monkeypatch, model, resident):
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with checked(monkeypatch, model, speculative_config=speculation) as llm:
        tokens = [answer[0] for answer in short_lengths(llm)]
        found = counters(llm)
    assert tokens == [answer[0] for answer in resident(short_lengths)]
    assert found["vllm:dhisparse_fetched_rows{verify}"] > 0


def conversation(llm):
    """Shared prefixes, a second turn, and a reset of the prefix cache in between."""
    prefix = prompts(700, seed=3)[0]
    first = [prefix + rest for rest in prompts(1, 30, 400, seed=4)]
    results = [outputs(llm, first)]
    second = [ids + answer[0] + [9, 8, 7] for ids, answer in zip(first, results[0], strict=True)]
    results.append(outputs(llm, second))
    assert llm.reset_prefix_cache()
    results.append(outputs(llm, second))
    return results


@pytest.mark.parametrize("chunk", [64, 2048])
def test_prefix_caching(monkeypatch, model, resident, chunk):
    with checked(monkeypatch, model, max_num_batched_tokens=chunk) as llm:
        # Hits end at other places where pages are larger, so only the tokens must be equal.
        tokens = [[answer[0] for answer in turn] for turn in conversation(llm)]
        assert counters(llm)["vllm:prefix_cache_hits{}"] > 700
    expected = resident(conversation, max_num_batched_tokens=chunk)
    assert tokens == [[answer[0] for answer in turn] for turn in expected]


def crowded(llm):
    return outputs(llm, prompts(*[100] * 12, seed=9), 60)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_and_resume(monkeypatch, model, resident, caching):
    # Nine requests fit, until all of them reach their next block in the same step.
    options = {"max_model_len": 512, "enable_prefix_caching": caching}
    few = {"num_gpu_blocks_override": 40, "fixed_rows_per_request": 0}
    with checked(monkeypatch, model, **few, **options) as llm:
        tokens = [answer[0] for answer in crowded(llm)]
        found = counters(llm)
        assert found["vllm:num_preemptions{}"] > 0
        # An answer that is computed again is no verification.
        assert not [name for name in found if "verify" in name]
    assert tokens == [answer[0] for answer in resident(crowded, **options)]


def test_f31_stop_length_and_first_token_endings(monkeypatch, model, resident):
    ids = prompts(300)[0]
    (tokens, _), *_ = resident(one_request)
    with checked(monkeypatch, model, max_model_len=320) as llm:
        stop = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[tokens[6]])
        stopped = llm.generate([{"prompt_token_ids": ids}], stop)[0].outputs[0]
        end = tokens.index(tokens[6]) + 1
        assert list(stopped.token_ids) == tokens[:end]
        one = SamplingParams(temperature=0, max_tokens=1)
        first = llm.generate([{"prompt_token_ids": ids}], one)[0].outputs[0]
        assert list(first.token_ids) == tokens[:1]
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        longest = llm.generate([{"prompt_token_ids": ids}], long)[0].outputs[0]
        assert (list(longest.token_ids)[:16], longest.finish_reason) == (tokens, "length")


def one_request(llm):
    return outputs(llm, prompts(300))


@pytest.mark.parametrize("seed", range(3))
def test_f33_aborts_at_random_times(monkeypatch, model, resident, seed):
    rng = random.Random(seed)
    parameters = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = prompts(*[rng.randrange(1, 700) for _ in range(14)], seed=seed)
    with checked(
        monkeypatch,
        model,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=150,
        max_model_len=1024,
    ) as llm:
        engine, done, alive, number = llm.llm_engine, {}, set(), 0
        while number < len(texts) or engine.has_unfinished_requests():
            if number < len(texts) and rng.random() < 0.4:
                engine.add_request(str(number), {"prompt_token_ids": texts[number]}, parameters)
                alive.add(str(number))
                number += 1
            if alive and rng.random() < 0.15:
                victim = rng.choice(sorted(alive))
                alive.discard(victim)
                engine.abort_request([victim])
            for output in engine.step():
                if output.finished:
                    alive.discard(output.request_id)
                    done[int(output.request_id)] = list(output.outputs[0].token_ids)
    finished = {n: tokens for n, tokens in done.items() if len(tokens) == 40}
    assert finished
    with running(model, RESIDENT) as llm:
        expected = greedy(llm, [texts[n] for n in sorted(finished)], 40)
    assert [finished[n] for n in sorted(finished)] == expected


def test_f23_f25_host_pages_run_out(monkeypatch, model, resident):
    """Cached pages go first, then requests wait, then all finish."""
    row_bytes, layers, page_rows = 192 * 4, 6, 128
    pages = 12  # one request needs up to 4, and twelve need 24
    gib = (pages + 0.5) * page_rows * row_bytes * layers / 2**30
    options = {"max_model_len": 512}
    with checked(monkeypatch, model, host_pool_gib=gib, **options) as llm:
        state = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.state
        assert state.pages.num_pages == pages
        tokens = [answer[0] for answer in crowded(llm)]
        again = [answer[0] for answer in crowded(llm)]
    expected = [answer[0] for answer in resident(crowded, **options)]
    assert tokens == expected
    assert again == expected
