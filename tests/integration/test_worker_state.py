from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.worker_state import WorkerState
from vllm_dhisparse.runtime.ops import data_plane

NUM_LAYERS = 12
LEADERS = (0, 2, 10)


def worker_state():
    """Twelve layers in three latent groups, round robin, as vLLM spreads them."""
    plan = plan_pages(16 * 4, 16 * 4)
    sizes = Geometry(16, 16 * 4, NUM_LAYERS, 4, plan, 1)
    one = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    latent = DHiSparseLatentSpec(block_size=64, base_units_per_request=1, **one)
    keys = MLAAttentionSpec(
        block_size=plan.indexer_block_tokens, cache_role=SparseCacheRole.INDEXER, **one
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(NUM_LAYERS)]
    layers = {
        name: SimpleNamespace(impl=SimpleNamespace(is_leader=number in LEADERS))
        for number, name in enumerate(names)
    }
    groups = [SimpleNamespace(kv_cache_spec=keys, layer_names=["model.layers.0.indexer.k_cache"])]
    groups += [SimpleNamespace(kv_cache_spec=latent, layer_names=names[i::3]) for i in range(3)]
    state = WorkerState(
        SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            model_config=SimpleNamespace(
                dtype=torch.float32, hf_text_config=SimpleNamespace(index_topk=4)
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=2),
        ),
        DHiSparseConfig(),
        sizes,
        SimpleNamespace(kv_cache_groups=groups, num_blocks=31),
        num_pages=3,
        ops=data_plane("cpu"),
    )
    return state, [layers[name].impl.place for name in names]


def test_layers_are_placed_by_their_number_also_beyond_the_tenth():
    state, places = worker_state()
    assert [place.index_group for place in places] == [0, 0, *[1] * 8, 2, 2]
    assert [place.latent_group for place in places] == [0, 1, 2] * 4
    assert [place.followers for place in places] == [2, 0, 8, *[0] * 7, 2, 0]
    assert [place.host.data_ptr() for place in places] == [
        state.pool.layer(number).data_ptr() for number in range(NUM_LAYERS)
    ]
    assert state.tables.sizes.num_units == 10
    assert state.tables.sizes.index_groups == len(LEADERS)
