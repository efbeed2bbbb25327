"""`vllm serve --attention-backend DHISPARSE`: processes of their own, over HTTP."""

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import vllm
from engine import RESIDENT, greedy, prompts, running
from server import serving

import vllm_dhisparse


@pytest.fixture(scope="module")
def expected(tiny_dsa):
    with running(tiny_dsa(), RESIDENT, enable_prefix_caching=False) as llm:
        return greedy(llm, prompts(70, 300, 900), 12)


def completion(server, ids, tokens=12):
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    choice = server.post("/v1/completions", **body, return_token_ids=True)["choices"][0]
    return choice["token_ids"]


def disconnect_in_mid_answer(server):
    """Ask for a long answer and hang up after its first bytes."""
    body = {"model": "tiny", "prompt": prompts(600)[0], "max_tokens": 3000, "stream": True}
    text = json.dumps(body | {"temperature": 0, "ignore_eos": True})
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        assert connection.recv(100)


def decoded(metrics):
    """Rows selected while decoding, wherever they were found."""
    tiers = ("tail", "required", "optional", "host")
    return sum(metrics[f"vllm:dhisparse_selected_rows_total{{decode,{tier}}}"] for tier in tiers)


def idle(server):
    found = server.metrics()
    return found["vllm:num_requests_running{}"] == found["vllm:kv_cache_usage_perc{}"] == 0


def test_one_api_server(tiny_dsa, tmp_path, expected):
    with serving(tiny_dsa(), tmp_path) as server:
        zeros = server.metrics()
        assert decoded(zeros) == 0
        info = f"64,adaptive,none,{vllm_dhisparse.__version__},{vllm.__version__}"
        assert zeros[f"vllm:dhisparse_mode_info{{{info}}}"] == 1
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda ids: completion(server, ids), prompts(70, 300, 900)))
        assert answers == expected
        found = server.metrics()
        assert decoded(found) == 2 * 3 * 11 * 64
        fetched = found["vllm:dhisparse_fetched_rows_total{decode}"]
        assert fetched == found["vllm:dhisparse_selected_rows_total{decode,host}"]

        message = {"role": "user", "content": "Hello"}
        chat = server.post("/v1/chat/completions", messages=[message], max_tokens=4)
        assert chat["usage"]["completion_tokens"] == 4

        disconnect_in_mid_answer(server)
        deadline = time.monotonic() + 60
        while not idle(server):
            assert time.monotonic() < deadline, server.metrics()
            time.sleep(0.2)
            completion(server, prompts(5)[0], 1)  # gauges move with steps only
    assert "residency adaptive" in server.log.read_text()


def test_two_api_servers_agree_on_the_metrics(tiny_dsa, tmp_path, expected):
    with serving(tiny_dsa(), tmp_path, "--api-server-count", "2") as server:
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda ids: completion(server, ids), prompts(70, 300, 900)))
        assert answers == expected
        capacities = set()
        for _ in range(6):  # whichever of the two answers
            found = server.metrics()
            assert decoded(found) == 2 * 3 * 11 * 64
            info = [name for name in found if name.startswith("vllm:dhisparse_mode_info")]
            assert [found[name] for name in info] == [1]
            states = ("grow", "hold", "shrink", "reclaim")
            assert sum(found[f"vllm:dhisparse_controller_state{{{each}}}"] for each in states) == 1
            classes = [name for name in found if name.startswith("vllm:dhisparse_residency_bytes")]
            capacities.add(sum(found[name] for name in classes))
        assert len(capacities) == 1
        assert min(capacities) > 0


SPAWNED = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model=model, attention_backend="DHISPARSE", dtype="float32", max_model_len=4096,
        disable_log_stats=False, speculative_config=json.loads(sys.argv[3]),
    )
    parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters)
    verified = sum(
        m.value for m in llm.get_metrics()
        if m.name == "vllm:dhisparse_selected_rows" and m.labels["phase"] == "verify"
    )
    print("RESULT", json.dumps([[list(o.outputs[0].token_ids) for o in outputs], verified]))
"""


def test_offline_engine_in_a_spawned_process_with_ngram_drafts(
    tiny_dsa, tmp_path, expected, monkeypatch
):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    script = tmp_path / "offline.py"
    script.write_text(SPAWNED)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    arguments = [str(tiny_dsa()), json.dumps(prompts(70, 300, 900)), json.dumps(drafts)]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    tokens, verified = json.loads(lines[0].removeprefix("RESULT "))
    assert tokens == expected
    assert verified > 0
