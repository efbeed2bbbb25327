"""How much host memory the history may take: decided once, where the engine starts."""

from typing import TYPE_CHECKING

import psutil

from vllm_dhisparse.core.page_plan import check_host_pool
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.names import HOST_PAGES
from vllm_dhisparse.runtime.available_memory import available_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def host_pages(vllm_config: "VllmConfig", sizes: Geometry) -> int:
    """Return the host pages of each tensor-parallel rank.

    Every API server asks again, when the engine may have filled the memory already. So
    only a pool that the user has given is checked here; the engine checks any.

    Raises:
        ValueError: the given pool does not hold one request of the maximum length.

    """
    config = sizes.config
    page_tokens = sizes.plan.indexer_block_tokens
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    max_len = vllm_config.model_config.max_model_len
    if config.host_pool_gib is None:
        # The device of a CPU engine is the same memory, and vLLM has its share of it.
        on_cuda = vllm_config.device_config.device_type == "cuda"
        taken = 0 if on_cuda else kv_cache_bytes(vllm_config)
        left = max(available_bytes() - taken, 0)
        budget = left // 2 // max(parallel.data_parallel_size_local, 1)
    else:
        budget = int(config.host_pool_gib * 2**30)
    pages = budget // (sizes.page_bytes * ranks)
    lookahead = vllm_config.num_lookahead_tokens
    if config.host_pool_gib is not None:
        refuse_small_pool(vllm_config, sizes, pages)
    else:
        request_pages = -(-(max_len + lookahead) // page_tokens)
        pages = min(pages, vllm_config.scheduler_config.max_num_seqs * request_pages)
    return pages


def usable_pages(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Return the host pages that were decided on, at most one for each block of the device."""
    pages = vllm_config.kv_transfer_config.kv_connector_extra_config[HOST_PAGES]
    return int(min(pages, kv_cache_config.num_blocks - 1))


def refuse_small_pool(vllm_config: "VllmConfig", sizes: Geometry, num_pages: int) -> None:
    """Raise a ValueError unless one request of the maximum length fits."""
    check_host_pool(
        num_pages,
        sizes.plan.indexer_block_tokens,
        sizes.page_bytes * vllm_config.parallel_config.tensor_parallel_size,
        vllm_config.model_config.max_model_len,
        vllm_config.num_lookahead_tokens,
    )


def kv_cache_bytes(vllm_config: "VllmConfig") -> int:
    """Return what all CPU workers of this machine may take for their KV caches."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.kv_cache_memory_bytes is None:
        # Each worker takes this share of its memory node, for everything that it holds.
        return int(psutil.virtual_memory().total * cache.gpu_memory_utilization)
    workers = parallel.tensor_parallel_size * max(parallel.data_parallel_size_local, 1)
    return int(workers * cache.kv_cache_memory_bytes)
