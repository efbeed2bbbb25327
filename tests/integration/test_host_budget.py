from types import SimpleNamespace

import pytest
import torch

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration import host_budget
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.host_budget import host_pages, refuse_small_pool

GIB = 2**30


def vllm_config(device="cpu", **parallel):
    sizes = {"tensor_parallel_size": 1, "data_parallel_size_local": 1} | parallel
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(max_model_len=1000),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=0, gpu_memory_utilization=0.9),
        num_lookahead_tokens=0,
    )


def geometry(**settings):
    """Pages of 128 tokens, 64 KiB in each of 16 layers: 1 MiB."""
    return Geometry(
        DHiSparseConfig(**settings), 128, torch.float32, 16, plan_pages(512, 256), 2, 64
    )


def test_a_given_pool_is_used_whole():
    sizes = geometry(host_pool_gib=1)
    assert sizes.page_bytes == 128 * 512 * 16
    pages = host_pages(vllm_config(), sizes)
    assert pages == GIB // sizes.page_bytes


def test_tensor_parallel_ranks_share_the_pool():
    sizes = geometry(host_pool_gib=1)
    one = host_pages(vllm_config(), sizes)
    assert host_pages(vllm_config(tensor_parallel_size=4), sizes) == one // 4


@pytest.mark.parametrize(
    ("available", "engines", "pages"),
    [(100 * GIB, 1, 4 * 8), (1 * GIB // 16, 1, 32), (GIB // 32, 1, 16), (GIB // 32, 2, 8)],
)
def test_the_default_is_half_of_the_memory_and_no_more_than_requests_use(
    monkeypatch, available, engines, pages
):
    monkeypatch.setattr(host_budget, "available_bytes", lambda: available)
    config = vllm_config(data_parallel_size_local=engines)
    assert host_pages(config, geometry()) == pages


@pytest.mark.parametrize(("ranks", "pages"), [(1, 16), (2, 4)])
def test_the_default_leaves_room_for_the_kv_cache_in_the_same_memory(monkeypatch, ranks, pages):
    monkeypatch.setattr(host_budget, "available_bytes", lambda: 48 * 2**20)
    config = vllm_config(tensor_parallel_size=ranks)
    config.model_config.max_model_len = 500
    config.scheduler_config.max_num_seqs = 8
    config.cache_config.kv_cache_memory_bytes = 16 * 2**20
    assert host_pages(config, geometry()) == pages


def test_the_kv_cache_of_a_gpu_takes_nothing_from_the_host(monkeypatch):
    monkeypatch.setattr(host_budget, "available_bytes", lambda: 48 * 2**20)
    config = vllm_config(device="cuda")
    config.cache_config.kv_cache_memory_bytes = 100 * GIB
    assert host_pages(config, geometry()) == 24


def test_without_a_size_the_kv_cache_takes_its_share_of_the_machine(monkeypatch):
    machine = SimpleNamespace(total=1000)
    monkeypatch.setattr(host_budget.psutil, "virtual_memory", lambda: machine)
    config = vllm_config(tensor_parallel_size=2)
    config.cache_config.kv_cache_memory_bytes = None
    assert host_budget.kv_cache_bytes(config) == 900


def test_a_given_pool_too_small_for_one_request_is_refused():
    with pytest.raises(ValueError, match=r"raise dhisparse\.host_pool_gib to at least"):
        host_pages(vllm_config(), geometry(host_pool_gib=1 / 256))


def test_a_machine_too_small_is_left_to_the_engine_to_refuse(monkeypatch):
    monkeypatch.setattr(host_budget, "available_bytes", lambda: GIB // 128)
    pages = host_pages(vllm_config(), geometry())
    with pytest.raises(ValueError, match=r"raise dhisparse\.host_pool_gib to at least"):
        refuse_small_pool(vllm_config(), geometry(), pages)
