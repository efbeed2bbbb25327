"""How the device's KV memory is used, from vLLM's own books."""

from collections import Counter
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

from vllm_dhisparse.core.ledger import LedgerLevels
from vllm_dhisparse.integration.draft_ring import DraftRingManager
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.metrics import RESIDENCY_CLASSES

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_INDEXER_LAYER = ".indexer."


def residency_bytes(
    manager: "KVCacheManager", config: "KVCacheConfig", units: LedgerLevels | None
) -> dict[str, int]:
    """Return bytes by residency class; they sum to the capacity without vLLM's null block.

    Args:
        manager: vLLM's.
        config: the scheduler's plan of the cache.
        units: the ledger's levels; None under residency ``resident``, where a block of a
            group with latent and indexer layers is divided by the size of their pages.

    """
    bytes_per_block = config.kv_cache_tensors[0].size // config.num_blocks
    usage = Counter(dict.fromkeys(RESIDENCY_CLASSES, 0))
    if units is None:
        for group, blocks in zip(
            config.kv_cache_groups, _blocks_in_use(manager, config), strict=True
        ):
            if _is_draft(group):
                usage["draft_ring"] += blocks * bytes_per_block
                continue
            indexer = round(blocks * bytes_per_block * _indexer_share(group, config))
            usage["indexer"] += indexer
            usage["tail"] += blocks * bytes_per_block - indexer
        usage["free"] = (config.num_blocks - 1) * bytes_per_block - usage.total()
        return dict(usage)
    latent_groups = sum(
        isinstance(g.kv_cache_spec, DHiSparseLatentSpec) for g in config.kv_cache_groups
    )
    unit_bytes = latent_groups * bytes_per_block
    usage["tail"] = units.tail_units * unit_bytes
    usage["required"] = units.required_units * unit_bytes
    usage["optional"] = units.optional_units * unit_bytes
    draft_blocks = sum(
        blocks
        for group, blocks in zip(
            config.kv_cache_groups, _blocks_in_use(manager, config), strict=True
        )
        if _is_draft(group)
    )
    usage["draft_ring"] = draft_blocks * bytes_per_block
    usage["free"] = units.free_blocks * bytes_per_block - usage["optional"]
    usage["indexer"] = (config.num_blocks - 1) * bytes_per_block - usage.total()
    return dict(usage)


def _is_draft(group: "KVCacheGroupSpec") -> bool:
    """Whether the group's layers are a drafter's; those of the target are MLA."""
    target = (DHiSparseLatentSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs)
    return not isinstance(group.kv_cache_spec, target)


def _blocks_in_use(manager: "KVCacheManager", config: "KVCacheConfig") -> list[int]:
    pool = manager.block_pool
    if len(config.kv_cache_groups) == 1:
        return [config.num_blocks - 1 - pool.get_num_free_blocks()]
    return [
        group.num_rings * group.ring_blocks
        if isinstance(group, DraftRingManager)
        else len(
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
