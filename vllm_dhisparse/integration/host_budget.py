"""How much host memory the history may take: decided once, where the engine starts."""

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.page_plan import check_host_pool
from vllm_dhisparse.integration.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HOST_PAGES = "dhisparse_host_pages"
"""Key in the connector's extra configuration that carries the number to all processes."""

_CGROUP = Path("/sys/fs/cgroup")


def host_pages(vllm_config: "VllmConfig", config: DHiSparseConfig, sizes: Geometry) -> int:
    """Return the host pages of each tensor-parallel rank.

    Raises:
        ValueError: they do not hold one request of the maximum length.

    """
    page_tokens = sizes.plan.indexer_block_tokens
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    max_len = vllm_config.model_config.max_model_len
    if config.host_pool_gib is None:
        budget = available_bytes() // 2 // max(parallel.data_parallel_size_local, 1)
    else:
        budget = int(config.host_pool_gib * 2**30)
    pages = budget // (sizes.page_bytes * ranks)
    lookahead = vllm_config.num_lookahead_tokens
    check_host_pool(pages, page_tokens, sizes.page_bytes * ranks, max_len, lookahead)
    if config.host_pool_gib is None:
        request_pages = -(-(max_len + lookahead) // page_tokens)
        pages = min(pages, vllm_config.scheduler_config.max_num_seqs * request_pages)
    return pages


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory this process could still use, its control group's limit included."""
    available = psutil.virtual_memory().available
    files = [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ]
    for limit_file, usage_file in files:
        try:
            limit = (cgroup / limit_file).read_text().strip()
            usage = int((cgroup / usage_file).read_text())
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(int(limit) - usage, 0))
    return int(available)
