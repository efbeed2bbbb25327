from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration import link_speed
from vllm_dhisparse.integration.attention import DHiSparseImpl
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.row_counters import HostRowCounters
from vllm_dhisparse.integration.worker_side import latent_layers
from vllm_dhisparse.integration.worker_state import WorkerState
from vllm_dhisparse.runtime.ops import data_plane

NUM_LAYERS = 12
LEADERS = (0, 2, 10)
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(NUM_LAYERS)]


def latent_layer(number):
    impl = object.__new__(DHiSparseImpl)  # its constructor wants a whole model
    impl.is_leader = number in LEADERS
    return SimpleNamespace(impl=impl, kv_cache=torch.zeros(31, 64, 16))


def test_f09_a_step_of_padding_alone_touches_nothing():
    impl = object.__new__(DHiSparseImpl)
    impl.path = None
    cache = torch.zeros(2, 64, 6)
    rows, no_slots = torch.ones(3, 4), torch.full((3,), -1)
    impl.do_kv_cache_update(rows, torch.ones(3, 1, 2), cache, no_slots, "auto", torch.ones(1))
    assert not cache.any()


def worker_state(num_pages):
    """Twelve layers in three latent groups, round robin, as vLLM spreads them."""
    context = {name: latent_layer(number) for number, name in enumerate(NAMES)}
    context["model.layers.0.self_attn.indexer.k_cache"] = SimpleNamespace()
    layers = latent_layers(sorted(context), context)
    assert list(layers) == NAMES

    plan = plan_pages(16 * 4, 16 * 4)
    one = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    latent = DHiSparseLatentSpec(block_size=64, base_units_per_request=1, **one)
    keys = MLAAttentionSpec(
        block_size=plan.indexer_block_tokens, cache_role=SparseCacheRole.INDEXER, **one
    )
    groups = [SimpleNamespace(kv_cache_spec=keys, layer_names=["model.layers.0.indexer.k_cache"])]
    groups += [SimpleNamespace(kv_cache_spec=latent, layer_names=NAMES[i::3]) for i in range(3)]
    sizes = Geometry(DHiSparseConfig(), 16, torch.float32, NUM_LAYERS, plan, 1, 8)
    ops = data_plane("cpu")
    return WorkerState(
        sizes,
        SimpleNamespace(kv_cache_groups=groups, num_blocks=31),
        layers,
        num_pages,
        ops=ops,
        counters=HostRowCounters(True, [64 * 2, 64 * 8, 64 * 2]),
        device=layers[NAMES[0]].impl.worker_device(ops, sizes),
    )


def test_layers_are_placed_by_their_number_also_beyond_the_tenth():
    state = worker_state(num_pages=3)
    assert [place.index_group for place in state.places] == [0, 0, *[1] * 8, 2, 2]
    assert [place.latent_group for place in state.places] == [0, 1, 2] * 4
    assert [place.host.pages.data_ptr() for place in state.places] == [
        state.pool.layer(number).data_ptr() for number in range(NUM_LAYERS)
    ]
    assert state.tables.sizes.num_units == 10
    assert state.tables.sizes.index_groups == len(LEADERS)


def test_the_link_is_measured_by_fetching_rows_and_leaves_nothing_behind(monkeypatch):
    state = worker_state(num_pages=3)
    state.places[0].host.pages.fill_(3)
    seconds = iter([0, 9.0, 10, 10.25, 20, 20.5, 30, 39.0])  # the second try takes 0.25 s
    monkeypatch.setattr(link_speed, "perf_counter", lambda: next(seconds))
    fetched = []
    retrieve = state.ops.retrieve
    state.ops = SimpleNamespace(
        retrieve=lambda plan, *places: fetched.append(retrieve(plan, *places)[0].clone())
    )
    found = link_speed.link_bytes_per_ms(state)
    assert len(fetched) == 4
    rows = found * 250 / (16 * 4)
    assert 4 < rows == round(rows) <= len(state.staging)
    assert (fetched[0][: round(rows)] == 3).all()
    assert not state.staging[: round(rows)].any()
