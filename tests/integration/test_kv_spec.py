"""The latent spec in vLLM's own planning of KV cache groups."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec
from vllm_dhisparse.integration.manager import register_latent_spec

register_latent_spec()


def config(max_model_len=131_072, max_in_flight_tokens=16_384, num_lookahead_tokens=8):
    return SimpleNamespace(
        max_in_flight_tokens=max_in_flight_tokens,
        num_lookahead_tokens=num_lookahead_tokens,
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
        ),
    )


def indexer_spec():
    return MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )


def latent_spec(row_bytes, page_size_padded, base_units=32):
    return DHiSparseLatentSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8 if row_bytes == 656 else torch.bfloat16,
        state_content_bytes=row_bytes,
        page_size_padded=page_size_padded,
        base_units_per_request=base_units,
        max_tp_shards=1,
    )


@pytest.mark.parametrize(
    ("row_bytes", "num_latent", "num_indexer", "latent_groups", "indexer_block"),
    [
        pytest.param(656, 78, 21, [20, 20, 19, 19], 320, id="GLM-5.3 fp8"),
        pytest.param(1152, 78, 21, [20, 20, 19, 19], 576, id="GLM-5.3 bf16"),
        pytest.param(656, 61, 61, [61], 320, id="DeepSeek-V3.2 fp8"),
    ],
)
def test_vllm_groups_the_layers_as_planned(
    row_bytes, num_latent, num_indexer, latent_groups, indexer_block
):
    plan = plan_pages(row_bytes, 132)
    specs = {f"{i}.attn": latent_spec(row_bytes, plan.page_size_padded) for i in range(num_latent)}
    specs |= {f"{i}.indexer": indexer_spec() for i in range(num_indexer)}
    groups = get_kv_cache_groups(config(), specs)
    latent = [g for g in groups if isinstance(g.kv_cache_spec, DHiSparseLatentSpec)]
    (indexer,) = [g for g in groups if is_indexer_spec(g.kv_cache_spec)]
    assert sorted((len(g.layer_names) for g in latent), reverse=True) == latent_groups
    assert indexer.kv_cache_spec.block_size == indexer_block == plan.indexer_block_tokens
    assert {g.kv_cache_spec.page_size_bytes for g in groups} == {plan.page_bytes}


def test_without_padding_vllm_cannot_unify_the_pages():
    specs = {"attn": latent_spec(656, None), "indexer": indexer_spec()}
    with pytest.raises(NotImplementedError, match="page size is not divisible"):
        get_kv_cache_groups(config(), specs)


def test_resident_layers_without_a_drafter_need_no_padding():
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=656
    )
    assert plan_pages(656, 132).resident_page_size_padded is None
    (group,) = get_kv_cache_groups(config(), {"attn": latent, "indexer": indexer_spec()})
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)


def test_memory_of_one_request_does_not_grow_with_the_context():
    spec = latent_spec(656, 42_240)
    tail_blocks = -(-(16_384 + 8) // 64) + 1
    assert spec.max_memory_usage_bytes(config()) == (tail_blocks + 32) * 42_240
    assert spec.max_memory_usage_bytes(config(max_model_len=2**20)) == (tail_blocks + 32) * 42_240
    assert spec.max_memory_usage_bytes(config(max_model_len=130)) == 3 * 42_240


def test_f36_the_spec_takes_no_part_in_prefix_caching():
    spec = latent_spec(656, 42_240)
    assert not spec.prefix_cacheable
    assert not is_indexer_spec(spec)
    assert spec.unpadded_page_size_bytes == 64 * 656
