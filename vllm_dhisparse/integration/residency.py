"""How the device's KV memory is used, from vLLM's own books."""

from collections import Counter
from typing import TYPE_CHECKING

from vllm_dhisparse.metrics import RESIDENCY_CLASSES

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_INDEXER_LAYER = ".indexer."


def residency_bytes(manager: "KVCacheManager", config: "KVCacheConfig") -> dict[str, int]:
    """Return bytes by residency class; they sum to the capacity without vLLM's null block.

    A block belongs to one KV group at a time. Where a group holds latent and indexer
    layers, its blocks are divided by the size of their pages.
    """
    bytes_per_block = config.kv_cache_tensors[0].size // config.num_blocks
    usage = Counter(dict.fromkeys(RESIDENCY_CLASSES, 0))
    in_use = _blocks_in_use(manager, config)
    for group, blocks in zip(config.kv_cache_groups, in_use, strict=True):
        share = _indexer_share(group, config)
        indexer = round(blocks * bytes_per_block * share)
        usage["indexer"] += indexer
        usage["tail"] += blocks * bytes_per_block - indexer
    usage["free"] = (config.num_blocks - 1) * bytes_per_block - usage.total()
    return dict(usage)


def _blocks_in_use(manager: "KVCacheManager", config: "KVCacheConfig") -> list[int]:
    pool = manager.block_pool
    if len(config.kv_cache_groups) == 1:
        return [config.num_blocks - 1 - pool.get_num_free_blocks()]
    return [
        len(
            {b.block_id for blocks in group.req_to_blocks.values() for b in blocks if not b.is_null}
        )
        for group in manager.coordinator.single_type_managers
    ]


def _indexer_share(group: "KVCacheGroupSpec", config: "KVCacheConfig") -> float:
    """Return the indexer layers' part of the pages in one block of the group."""
    page_of = {
        layer: min(tensor.layer_stride, tensor.block_stride)  # by layout, one of them is a page
        for tensor in config.kv_cache_tensors
        for layer in tensor.layers
    }
    pages = {layer: page_of[layer] for layer in group.layer_names}
    indexer = sum(page for layer, page in pages.items() if _INDEXER_LAYER in layer)
    return indexer / sum(pages.values())
