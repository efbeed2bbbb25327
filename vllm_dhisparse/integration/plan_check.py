"""Compares the KV groups that vLLM made with the page plan, before anything relies on it."""

from typing import TYPE_CHECKING

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_dhisparse.core.page_plan import PagePlan


def check_groups(kv_cache_config: "KVCacheConfig", plan: "PagePlan") -> None:
    """Compare pages and blocks of every group, under residencies with a hierarchy.

    Raises:
        RuntimeError: they differ; the message has all groups in a table.

    """
    lines, wrong = [], False
    kinds = set()
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        block: int | None
        if isinstance(spec, DHiSparseLatentSpec):
            kind, block = "latent", UNIT_ROWS
        elif is_indexer_spec(spec):
            kind, block = "indexer", plan.indexer_block_tokens
        else:
            kind, block = "draft", plan.drafter_block_tokens
        kinds.add(kind)
        found = spec.block_size, spec.page_size_bytes
        planned = block, plan.page_bytes
        wrong |= found != planned
        lines.append(
            f"  {kind:8} {len(group.layer_names):4} layers, blocks of {found[0]} tokens "
            f"(planned {planned[0]}), pages of {found[1]} B (planned {planned[1]})"
        )
    if wrong or not {"latent", "indexer"} <= kinds:
        raise RuntimeError(
            "DHISPARSE: vLLM made other KV groups than were planned; please report this with "
            "your model and options:\n" + "\n".join(lines)
        )
