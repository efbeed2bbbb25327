"""vLLM's own planning of the KV cache for real models' sizes, against recorded tables.

Runs with the planning code of the installed vLLM, and by ``tests/vllm_033/run.sh`` with that
of 0.33.
"""

import json
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration.attention import LatentPlan
from vllm_dhisparse.integration.cuda.backend import CudaBackend
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec
from vllm_dhisparse.integration.manager import register_latent_spec
from vllm_dhisparse.integration.plan_check import check_groups

PLANNING = "vllm.v1.core.kv_cache_planning"  # of 0.33; before, a part of kv_cache_utils
is_033 = find_spec(PLANNING) is not None
planning = import_module(PLANNING if is_033 else "vllm.v1.core.kv_cache_utils")
CASES = json.loads((Path(__file__).parents[1] / "data/kv_groups.json").read_text())["cases"]
HEAD_BYTES = 2 * 128 * 2  # key and value of one draft head
GIB = 2**30

register_latent_spec()


def engine_config(max_model_len=131_072):
    return SimpleNamespace(
        max_in_flight_tokens=16_384,
        num_lookahead_tokens=8,
        speculative_config=None,
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            original_max_model_len=max_model_len,
            supports_kv_cache_grouping=False,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
    )


def stock_latent_spec(row_bytes):
    """As vLLM's MLA layer makes it."""
    is_fp8 = row_bytes == 656
    return MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8 if is_fp8 else torch.bfloat16,
        cache_dtype_str="fp8_ds_mla" if is_fp8 else "auto",
        state_content_bytes=row_bytes if is_fp8 else None,
        max_tp_shards=1,
    )


def plan_of(case):
    heads = case.get("draft_heads")
    return plan_pages(case["row_bytes"], 132, heads and heads * HEAD_BYTES)


def specs_of(case, monkeypatch, padded=True):
    plan = plan_of(case)
    pad = plan.page_size_padded if padded else None
    monkeypatch.setattr(CudaBackend, "latent", LatentPlan(pad, base_units=32))
    latent = CudaBackend.customize_spec(stock_latent_spec(case["row_bytes"]))
    keys = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
        max_tp_shards=1,
    )
    specs = {f"{i}.attn": latent for i in range(case["latent_layers"])}
    specs |= {f"{i}.indexer": keys for i in range(case["indexer_layers"])}
    for i in range(case.get("draft_layers", 0)):
        specs[f"draft.{i}"] = SlidingWindowSpec(
            block_size=plan.drafter_block_tokens,
            num_kv_heads=case["draft_heads"],
            head_size=128,
            dtype=torch.bfloat16,
            sliding_window=2048,
        )
    return specs


def sizes(groups):
    return sorted((len(group.layer_names) for group in groups), reverse=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_groups_are_the_recorded_ones(case, monkeypatch):
    groups = planning.get_kv_cache_groups(engine_config(), specs_of(case, monkeypatch))
    latent = [g for g in groups if isinstance(g.kv_cache_spec, DHiSparseLatentSpec)]
    indexer = [g for g in groups if is_indexer_spec(g.kv_cache_spec)]
    draft = [g for g in groups if isinstance(g.kv_cache_spec, SlidingWindowSpec)]
    assert len(latent) + len(indexer) + len(draft) == len(groups)
    assert sizes(latent) == case["latent"]
    assert sizes(indexer) == case["indexer"]
    assert sizes(draft) == case.get("draft", [])
    assert {g.kv_cache_spec.block_size for g in latent} == {64}
    assert {g.kv_cache_spec.block_size for g in indexer} == {case["indexer_block"]}
    assert {g.kv_cache_spec.block_size for g in draft} <= {case.get("draft_block")}
    pages = {g.kv_cache_spec.page_size_bytes for g in groups}
    assert pages == {case["page_bytes"]} == {plan_of(case).page_bytes}
    assert planning._pool_bytes_per_block(engine_config(), groups) == case["bytes_per_block"]


def planned_config(case, monkeypatch):
    groups = planning.get_kv_cache_groups(engine_config(), specs_of(case, monkeypatch))
    return planning.get_kv_cache_config_from_groups(engine_config(), groups, 60 * GIB)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_planned_groups_are_accepted(case, monkeypatch):
    check_groups(planned_config(case, monkeypatch), plan_of(case))


def test_other_groups_than_planned_are_listed(monkeypatch):
    config, plan = planned_config(CASES[0], monkeypatch), plan_of(CASES[0])
    for changed in (
        replace(plan, page_bytes=42_496),
        replace(plan, indexer_block_tokens=64),
    ):
        with pytest.raises(RuntimeError, match=r"(?s)other KV groups.*latent +20 layers.*indexer"):
            check_groups(config, changed)
    config.kv_cache_groups = [
        g for g in config.kv_cache_groups if not is_indexer_spec(g.kv_cache_spec)
    ]
    with pytest.raises(RuntimeError, match="other KV groups"):
        check_groups(config, plan)


def test_rows_of_fp8_pages_need_no_zeroing_and_no_quantisation_of_vllm(monkeypatch):
    case = CASES[0]
    groups = planning.get_kv_cache_groups(engine_config(), specs_of(case, monkeypatch))
    config = planning.get_kv_cache_config_from_groups(engine_config(), groups, 60 * GIB)
    assert config.num_blocks == 60 * GIB // case["bytes_per_block"]
    assert not config.needs_kv_cache_zeroing


def test_without_the_padding_vllm_cannot_plan(monkeypatch):
    with pytest.raises(NotImplementedError, match="page size is not divisible"):
        planning.get_kv_cache_groups(engine_config(), specs_of(CASES[0], monkeypatch, padded=False))


@pytest.mark.skipif(not is_033, reason="of vLLM 0.33; run tests/vllm_033/run.sh")
@pytest.mark.parametrize(("gib", "fits"), [(2, False), (4, True)])
def test_a_context_beyond_the_device_starts(monkeypatch, gib, fits):
    """1,048,576 tokens of GLM-5.3: of the latents, only tail and base share must fit."""
    config = engine_config(max_model_len=2**20)
    groups = planning.get_kv_cache_groups(config, specs_of(CASES[0], monkeypatch))
    builder = planning.DefaultKVCacheConfigBuilder()
    needed = planning._max_memory_usage_bytes_from_groups(builder, config, groups)
    assert (needed <= gib * GIB) == fits
    arguments = (gib * GIB, lambda: needed, 2**20, lambda _: 1)
    if fits:
        planning._check_enough_kv_cache_memory(*arguments)
    else:
        with pytest.raises(ValueError, match="KV cache"):
            planning._check_enough_kv_cache_memory(*arguments)
