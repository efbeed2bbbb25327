"""What vLLM does to a request must not change its tokens; residency `resident`."""

import pytest
from engine import RESIDENT, all_blocks_free, counters, greedy, prompts, running, scheduler
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group


@pytest.fixture(scope="module")
def expected(tiny_dsa):
    """Tokens of prompts run one by one, without any of the features below."""
    with running(tiny_dsa(), RESIDENT, enable_prefix_caching=False) as llm:
        return {
            tuple(ids): greedy(llm, [ids], 24)[0]
            for ids in [
                *prompts(5, 70, 300, 900, 1500),
                *with_shared_prefix(),
                *at_a_block_border(),
            ]
        }


def with_shared_prefix():
    prefix = prompts(640, seed=7)[0]
    return [prefix + rest for rest in prompts(10, 200, 65, seed=8)]


def at_a_block_border():
    return prompts(*[120] * 6, seed=9)


def check(llm, token_ids, expected):
    for ids, tokens in zip(token_ids, greedy(llm, token_ids, 24), strict=True):
        assert tokens == expected[tuple(ids)], len(ids)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 2048])
def test_chunked_prefill_in_mixed_batches(tiny_dsa, expected, max_num_batched_tokens):
    options = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": False}
    with running(tiny_dsa(), RESIDENT, **options) as llm:
        check(llm, prompts(5, 70, 300, 900, 1500), expected)


def test_prefix_caching_and_its_reset(tiny_dsa, expected):
    with running(tiny_dsa(), RESIDENT, enable_prefix_caching=True) as llm:
        check(llm, with_shared_prefix()[:1], expected)
        check(llm, with_shared_prefix(), expected)
        assert counters(llm)["vllm:prefix_cache_hits{}"] >= 2 * 640
        assert llm.reset_prefix_cache()
        check(llm, with_shared_prefix(), expected)


def test_preemption_and_resume(tiny_dsa, expected):
    # 13 blocks hold six prompts of two blocks each, but not the third block of all.
    with running(tiny_dsa(), RESIDENT, num_gpu_blocks_override=14, max_model_len=512) as llm:
        check(llm, at_a_block_border(), expected)
        assert counters(llm)["vllm:num_preemptions{}"] > 0


def test_abort_returns_every_block(tiny_dsa):
    with running(tiny_dsa(), RESIDENT) as llm:
        engine = llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        for number, ids in enumerate(prompts(900, 1500, 30, 300)):
            engine.add_request(str(number), {"prompt_token_ids": ids}, parameters)
        for step in range(8):
            engine.step()
            if step in (1, 4, 6):
                engine.abort_request([str(step // 2)])
        assert not all_blocks_free(llm)
        engine.abort_request(["1"])
        engine.step()
        assert scheduler(llm).get_num_unfinished_requests() == 0


def test_stop_and_length_endings(tiny_dsa, expected):
    ids = prompts(300)[0]
    tokens = expected[tuple(prompts(5, 70, 300, 900, 1500)[2])]
    with running(tiny_dsa(), RESIDENT, max_model_len=320) as llm:
        stop = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[tokens[6]])
        third = {"prompt_token_ids": prompts(5, 70, 300, 900, 1500)[2]}
        assert list(llm.generate([third], stop)[0].outputs[0].token_ids) == tokens[: 6 + 1]
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        answer = llm.generate([{"prompt_token_ids": ids}], long)[0].outputs[0]
        assert (len(answer.token_ids), answer.finish_reason) == (20, "length")


def test_selected_rows_are_counted_once_per_index_group(tiny_dsa):
    with running(tiny_dsa(leaders=2), RESIDENT, enable_prefix_caching=False) as llm:
        greedy(llm, prompts(100), 11)
        found = counters(llm)
        # top-64 of 100 prompt tokens, then of the 10 tokens that were fed back.
        prefill = sum(min(i, 64) for i in range(1, 101))
        assert found["vllm:dhisparse_selected_rows{prefill,tail}"] == 2 * prefill
        assert found["vllm:dhisparse_selected_rows{decode,tail}"] == 2 * 10 * 64
        info = [name for name in found if name.startswith("vllm:dhisparse_mode_info")]
        assert [found[name] for name in info] == [1]
        assert "resident" in info[0]


def test_a_second_engine_cannot_take_the_connector_of_the_first(tiny_dsa):
    with running(tiny_dsa(layers=2, leaders=1), RESIDENT) as llm:
        tokens = greedy(llm, prompts(100))
        with pytest.raises(RuntimeError, match="another engine in this process"):
            get_kv_transfer_group().register_kv_caches({})  # what vLLM does for a second one
        assert greedy(llm, prompts(100)) == tokens


def test_residency_classes_sum_to_the_capacity(tiny_dsa):
    with running(tiny_dsa(layers=4, leaders=2), RESIDENT, num_gpu_blocks_override=101) as llm:
        engine = llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        engine.add_request("0", {"prompt_token_ids": prompts(1000)[0]}, parameters)
        for _ in range(5):
            engine.step()
        found = {k: v for k, v in counters(llm).items() if "residency_bytes" in k}
        latent, indexer = 4 * 64 * 192 * 4, 2 * 64 * 128 * 4  # layers * rows * values * bytes
        assert found["vllm:dhisparse_residency_bytes{tail}"] == 16 * latent
        assert found["vllm:dhisparse_residency_bytes{indexer}"] == 16 * indexer
        assert found["vllm:dhisparse_residency_bytes{free}"] == 84 * (latent + indexer)
        engine.abort_request(["0"])
        engine.step()
