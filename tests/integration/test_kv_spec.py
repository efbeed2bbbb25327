"""What the latent spec tells vLLM; ``test_kv_groups`` has the groups that come of it."""

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole, UniformTypeKVCacheSpecs

from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec
from vllm_dhisparse.integration.manager import register_latent_spec

from .test_kv_groups import engine_config, planning

register_latent_spec()


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


def test_resident_layers_without_a_drafter_need_no_padding():
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=656
    )
    assert plan_pages(656, 132).resident_page_size_padded is None
    (group,) = planning.get_kv_cache_groups(
        engine_config(), {"attn": latent, "indexer": indexer_spec()}
    )
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)


def test_memory_of_one_request_does_not_grow_with_the_context():
    spec = latent_spec(656, 42_240)
    tail_blocks = -(-(16_384 + 8) // 64) + 1
    assert spec.max_memory_usage_bytes(engine_config()) == (tail_blocks + 32) * 42_240
    assert (
        spec.max_memory_usage_bytes(engine_config(max_model_len=2**20))
        == (tail_blocks + 32) * 42_240
    )
    assert spec.max_memory_usage_bytes(engine_config(max_model_len=130)) == 3 * 42_240


def test_f36_the_spec_takes_no_part_in_prefix_caching():
    spec = latent_spec(656, 42_240)
    assert not spec.prefix_cacheable
    assert not is_indexer_spec(spec)
    assert spec.unpadded_page_size_bytes == 64 * 656
