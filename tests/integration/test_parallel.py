"""Two ranks on CPU: tokens of one, and each rank or engine with memory and counters of its own."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine import RESIDENT, greedy, prompts, running
from make_tiny_drafter import TinyDrafter, write
from server import serving
from speculation_settings import speculative_config

from .test_serve import completion, decoded

LENGTHS = (70, 300, 900, 150, 40, 500)
NEW_TOKENS = 12
LAYERS, LEADERS, TOP_K = 8, 2, 64
ROW = 192 * 4  # bytes in one layer
PAGE = 128 * ROW * LAYERS
HOST_PAGES = 64
SETTINGS = {"dhisparse": {"host_pool_gib": HOST_PAGES * PAGE / 2**30}}
OPTIONS = ("--additional-config", json.dumps(SETTINGS), "--num-gpu-blocks-override", "301")
DATA_PARALLEL = ("--data-parallel-size", "2", "--api-server-count", "1")
DECODED_ROWS = LEADERS * len(LENGTHS) * (NEW_TOKENS - 1) * TOP_K - LEADERS * sum(
    TOP_K - min(TOP_K, 40 + step) for step in range(1, NEW_TOKENS)
)
WRITTEN_BYTES = (sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)) * LAYERS * ROW


@pytest.fixture(scope="module")
def expected(tiny_dsa):
    with running(tiny_dsa(), RESIDENT) as llm:
        return greedy(llm, prompts(*LENGTHS), NEW_TOKENS)


def ask(server):
    """All requests at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda ids: completion(server, ids), prompts(*LENGTHS)))


def pages(found):
    states = ("held", "idle", "free")
    return sum(found[f"vllm:dhisparse_host_pool_pages{{{state}}}"] for state in states)


def capacity(found):
    return sum(v for k, v in found.items() if k.startswith("vllm:dhisparse_residency_bytes{"))


def written(found):
    return found["vllm:dhisparse_transfer_bytes_total{device_to_host}"]


def test_two_tensor_parallel_ranks(tiny_dsa, tmp_path, expected):
    """Latent rows are the same on both: rows count once, bytes and memory on each."""
    options = (*OPTIONS, "--tensor-parallel-size", "2")
    with serving(tiny_dsa(), tmp_path, *options, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        assert ask(server) == expected
        found = server.metrics()
    assert decoded(found) == DECODED_ROWS
    assert written(found) == 2 * WRITTEN_BYTES
    assert pages(found) == HOST_PAGES // 2, "the ranks share the host memory of their engine"
    assert capacity(found) == 300 * 2 * 65536, "of one rank"


def test_two_tensor_parallel_ranks_with_a_drafter(tiny_dsa, tmp_path):
    """Each rank has its heads of the draft KV in rings; both verify the same drafts."""
    model = tiny_dsa(layers=6, leaders=2, context_gain=2.5)
    lengths = (40, 300)
    with running(model, RESIDENT) as llm:
        tokens = greedy(llm, prompts(*lengths), NEW_TOKENS)
    drafter = tmp_path / "drafter"
    write(TinyDrafter(method="dspark", window=40, key_value_heads=2), model, drafter)
    speculation = json.dumps(speculative_config("dspark", drafter, 4))
    options = ("--tensor-parallel-size", "2", "--speculative-config", speculation)
    options += ("--max-num-seqs", "4", "--max-model-len", "1024")
    with serving(model, tmp_path, *options, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        assert [completion(server, ids) for ids in prompts(*lengths)] == tokens
        found = server.metrics()
    assert found["vllm:spec_decode_num_accepted_tokens_total{}"] > 0
    assert found["vllm:dhisparse_draft_ring_wraps_total{}"] > 0


def test_two_data_parallel_engines(tiny_dsa, tmp_path, expected):
    with serving(tiny_dsa(), tmp_path, *OPTIONS, *DATA_PARALLEL) as server:
        assert ask(server) == expected
        engines = [server.metrics(engine) for engine in "01"]
    assert all(decoded(found) > 0 for found in engines)
    assert sum(map(decoded, engines)) == DECODED_ROWS
    assert sum(map(written, engines)) == WRITTEN_BYTES
    for found in engines:
        assert pages(found) == HOST_PAGES, "every engine has a host pool of its own"
        assert capacity(found) == 300 * 2 * 65536
        info = [name for name in found if name.startswith("vllm:dhisparse_mode_info")]
        assert [found[name] for name in info] == [1]
        assert "adaptive" in info[0]
