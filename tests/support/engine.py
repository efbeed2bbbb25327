"""vLLM engines inside the test process, and what may be asked of them."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from server import series_name
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

RESIDENT = {"residency": "resident"}


@contextmanager
def running(model: Any, dhisparse: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """A DHISPARSE engine; checks at the end that every block came back.

    Args:
        model: folder.
        dhisparse: settings of this package.
        options: of vLLM.
    """
    settings: dict[str, Any] = {
        "additional_config": {"dhisparse": dhisparse},
        "attention_backend": "DHISPARSE",
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "disable_log_stats": False,
    }
    llm = LLM(model=str(model), **(settings | options))
    try:
        yield llm
        assert all_blocks_free(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del llm
        cleanup_dist_env_and_memory()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths, the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


def greedy(llm: LLM, token_ids: Sequence[Sequence[int]], max_tokens: int = 16) -> list[list[int]]:
    """The greedy continuation of each prompt, never stopped by an end token."""
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in token_ids], parameters, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler(llm: LLM) -> Any:
    """The engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def model_of(llm: LLM) -> Any:
    """The torch module of the only worker."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return worker.worker.model_runner.get_model()


def kv_caches(llm: LLM) -> list[Any]:
    """The KV cache tensors of all layers of the only worker."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]


def all_blocks_free(llm: LLM) -> bool:
    """Whether the pool holds every block but vLLM's null block."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def counters(llm: LLM) -> dict[str, float]:
    """Counters and gauges by ``name{values in the order of label names}``, zeros left out."""
    found = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value:
            found[series_name(metric.name, metric.labels)] = value
    return found
