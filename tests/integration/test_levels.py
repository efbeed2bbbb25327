"""Counters and gauges of the hierarchy, against figures worked out by hand."""

from engine import counters, prompts, running
from vllm import SamplingParams

LAYERS, LEADERS, TOP_K = 6, 2, 64
ROW = 192 * 4  # bytes in one layer
BLOCK = 2 * 65536  # two layers in each group; pages padded to two of 64 indexer keys
UNIT = 3 * BLOCK


def test_rows_bytes_and_pages_of_one_request(tiny_dsa):
    model = tiny_dsa(layers=LAYERS, leaders=LEADERS, index_topk=TOP_K)
    settings = {
        "residency": "fixed",
        "fixed_rows_per_request": 2 * 64,
        "stats_interval_steps": 2,
        "host_pool_gib": 10 * 128 * ROW * LAYERS / 2**30,
    }
    with running(model, settings, num_gpu_blocks_override=101, max_model_len=512) as llm:
        engine = llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        engine.add_request("0", {"prompt_token_ids": prompts(200)[0]}, parameters)
        for _ in range(1 + 4):
            engine.step()
        found = {k.removeprefix("vllm:dhisparse_"): v for k, v in counters(llm).items()}

        tiers = ("tail", "required", "host")
        selected = {
            phase: sum(found.get(f"selected_rows{{{phase},{tier}}}", 0) for tier in tiers)
            for phase in ("prefill", "decode", "verify")
        }
        prefill = sum(min(i, TOP_K) for i in range(1, 201))
        assert selected == {
            "prefill": LEADERS * prefill,
            "decode": LEADERS * 4 * TOP_K,
            "verify": 0,
        }
        fetched = sum(found.get(f"fetched_rows{{{phase}}}", 0) for phase in selected)
        assert fetched > 0
        per_group = LAYERS // LEADERS
        assert found["transfer_bytes{host_to_device}"] == fetched * per_group * ROW
        assert found["transfer_bytes{device_to_host}"] == (200 + 4) * LAYERS * ROW

        # Steps 2 and 4 of five are looked at; a query reads TOP_K rows, and has found those that
        # were not fetched in the cache or in the tail.
        histogram = next(m for m in llm.get_metrics() if m.name.endswith("request_union_rows"))
        assert (histogram.count, histogram.sum) == (2, 2 * TOP_K)
        hits = sum(found.get(f"sampled_hits{{{age}}}", 0) for age in range(4))
        assert 0 < hits <= 2 * TOP_K
        assert TOP_K / 2 < found["working_set_rows{}"] <= 2 * 64 + TOP_K

        # 204 tokens: the last 12 in the tail, keys in two blocks of 128.
        assert found["residency_bytes{tail}"] == UNIT
        assert found["residency_bytes{required}"] == 2 * UNIT
        assert found["residency_rows{required}"] == 2 * 64
        assert "residency_rows{optional}" not in found  # zero
        assert found["residency_bytes{indexer}"] == 2 * BLOCK
        assert found["residency_bytes{free}"] == (100 - 3 * 3 - 2) * BLOCK
        assert (found["host_pool_pages{held}"], found["host_pool_pages{free}"]) == (2, 8)
        assert found["host_pool_capacity_bytes{}"] == 10 * 128 * ROW * LAYERS

        engine.abort_request(["0"])
        engine.add_request("1", {"prompt_token_ids": prompts(5, seed=1)[0]}, parameters)
        engine.step()
        found = counters(llm)
        # The full page stays for a prefix hit, the other one goes.
        pages = {s: found[f"vllm:dhisparse_host_pool_pages{{{s}}}"] for s in ("held", "idle")}
        assert pages == {"held": 1, "idle": 1}
        engine.abort_request(["1"])
        engine.step()
