"""Sizes of a model's KV cache, from its configuration alone: the same in every process."""

from typing import TYPE_CHECKING, NamedTuple

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.page_plan import PagePlan, plan_pages
from vllm_dhisparse.integration.names import LATENT_BLOCK_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Geometry(NamedTuple):
    """Rows, pages and units of one engine.

    ``row_size``: values of a latent row; ``row_bytes``: its bytes in one layer;
    ``num_layers``: layers with latent rows; ``index_topk``: rows one query selects;
    ``plan``: block and page sizes; ``base_units``: required units of a running request.
    """

    row_size: int
    row_bytes: int
    num_layers: int
    index_topk: int
    plan: PagePlan
    base_units: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one host page, all layers."""
        return self.plan.indexer_block_tokens * self.row_bytes * self.num_layers


def geometry(vllm_config: "VllmConfig", config: DHiSparseConfig) -> Geometry:
    """Read the sizes of a DSA model whose cache has the model's dtype."""
    model = vllm_config.model_config
    hf_config = model.hf_text_config
    row_size = hf_config.kv_lora_rank + hf_config.qk_rope_head_dim
    itemsize = model.dtype.itemsize
    if config.residency == "fixed":
        rows, default = config.fixed_rows_per_request, 2 * hf_config.index_topk
    else:
        rows, default = config.base_rows_per_request, hf_config.index_topk
    rows = default if rows is None else rows
    return Geometry(
        row_size=row_size,
        row_bytes=row_size * itemsize,
        num_layers=hf_config.num_hidden_layers,
        index_topk=hf_config.index_topk,
        plan=plan_pages(row_size * itemsize, hf_config.index_head_dim * itemsize),
        base_units=-(-rows // LATENT_BLOCK_TOKENS),
    )


def staging_rows(vllm_config: "VllmConfig", config: DHiSparseConfig) -> int:
    """Rows of the staging area: by default a decode step of all requests is one pass.

    Raises:
        ValueError: the setting is below index_topk, so one query would not fit.

    """
    top_k = vllm_config.model_config.hf_text_config.index_topk
    if config.staging_rows is None:
        return int(2 * vllm_config.scheduler_config.max_num_seqs * top_k)
    if config.staging_rows < top_k:
        raise ValueError(
            f"dhisparse.staging_rows = {config.staging_rows} cannot hold the {top_k} rows that "
            "one query selects (index_topk); raise it"
        )
    return config.staging_rows
