"""Settings and sizes of an engine, from its configuration alone: the same in every process."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.page_plan import PagePlan, plan_pages
from vllm_dhisparse.integration.names import DRAFTS_WITH_CACHE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DRAFT_BLOCK_MULTIPLE = 32
"""Of the tokens in a draft block: what vLLM's CPU attention takes."""


class Geometry(NamedTuple):
    """Settings, rows, pages and units of one engine.

    ``config``: this package's settings; ``row_size``: values of a latent row; ``dtype``: of
    a value; ``num_layers``: layers with latent rows; ``plan``: block and page sizes;
    ``base_units``: required units of a running request; ``staging_rows``: rows of one layer
    that a step reads at once.
    """

    config: DHiSparseConfig
    row_size: int
    dtype: torch.dtype
    num_layers: int
    plan: PagePlan
    base_units: int
    staging_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one layer."""
        return self.row_size * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one host page, all layers."""
        return self.plan.indexer_block_tokens * self.row_bytes * self.num_layers

    def numa_node(self, rank: int) -> int | None:
        """Memory node of a tensor-parallel rank's host pool; None = not bound."""
        return None if self.config.numa_nodes is None else self.config.numa_nodes[rank]


def dhisparse_config(vllm_config: "VllmConfig") -> DHiSparseConfig:
    """Return the validated settings under ``--additional-config``'s key ``dhisparse``."""
    additional: Any = vllm_config.additional_config
    return DHiSparseConfig.from_mapping(additional.get("dhisparse") if additional else None)


def geometry(vllm_config: "VllmConfig") -> Geometry:
    """Read the sizes of a DSA model whose cache has the model's dtype.

    Raises:
        ValueError: a setting is wrong; the message names it.

    """
    config = dhisparse_config(vllm_config)
    model = vllm_config.model_config
    hf_config = model.hf_text_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if config.numa_nodes is not None and len(config.numa_nodes) != ranks:
        raise ValueError(
            f"dhisparse.numa_nodes names {len(config.numa_nodes)} memory nodes, one for each "
            f"tensor-parallel rank, but there are {ranks} ranks"
        )
    row_size = hf_config.kv_lora_rank + hf_config.qk_rope_head_dim
    if config.residency == "fixed":
        rows, default = config.fixed_rows_per_request, 2 * hf_config.index_topk
    else:
        rows, default = config.base_rows_per_request, hf_config.index_topk
    rows = min(default if rows is None else rows, model.max_model_len)
    itemsize = model.dtype.itemsize
    plan = plan_pages(
        row_size * itemsize,
        hf_config.index_head_dim * itemsize,
        _drafter_row_bytes(vllm_config),
        _DRAFT_BLOCK_MULTIPLE,
    )
    return Geometry(
        config=config,
        row_size=row_size,
        dtype=model.dtype,
        num_layers=hf_config.num_hidden_layers,
        plan=plan,
        base_units=-(-rows // UNIT_ROWS),
        staging_rows=_staging_rows(vllm_config, config, hf_config.index_topk),
    )


def _drafter_row_bytes(vllm_config: "VllmConfig") -> int | None:
    """Return the bytes of a token's key and value in one draft layer, None without a drafter."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in DRAFTS_WITH_CACHE:
        return None
    draft = speculation.draft_model_config
    heads = draft.get_num_kv_heads(speculation.draft_parallel_config)
    return int(2 * heads * draft.get_head_size() * draft.dtype.itemsize)


def _staging_rows(vllm_config: "VllmConfig", config: DHiSparseConfig, top_k: int) -> int:
    """By default a step that decodes or verifies all requests is one pass.

    Never more rows than the queries of a step select, or than its requests have.
    """
    scheduler = vllm_config.scheduler_config
    most = min(
        scheduler.max_num_batched_tokens * top_k,
        scheduler.max_num_seqs * vllm_config.model_config.max_model_len,
    )
    if config.staging_rows is None:
        speculation = vllm_config.speculative_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        wanted = scheduler.max_num_seqs * (1 + drafts) * top_k
        return max(top_k, min(wanted, most))
    if config.staging_rows < top_k:
        raise ValueError(
            f"dhisparse.staging_rows = {config.staging_rows} cannot hold the {top_k} rows that "
            "one query selects (index_topk); raise it"
        )
    return max(top_k, min(config.staging_rows, most))
