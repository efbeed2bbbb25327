"""Settings and sizes of an engine, from its configuration alone: the same in every process."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.page_plan import PagePlan, plan_pages
from vllm_dhisparse.integration.names import DRAFTS_WITH_CACHE, FP8_ROWS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DRAFT_BLOCK_MULTIPLES = {"cpu": 32, "cuda": 16}
"""Of the tokens in a draft block: what vLLM's attention takes on a device."""

_CUDA_STAGING_ROWS = 1 << 19
"""Rows of staging that a device has by default at most: 344 MB of fp8_ds_mla rows."""


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
    """Read the sizes of a DSA model on the device of its configuration.

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
    row_size, dtype = latent_row(
        vllm_config.cache_config.cache_dtype,
        model.dtype,
        hf_config.kv_lora_rank,
        hf_config.qk_rope_head_dim,
    )
    if config.residency == "fixed":
        rows, default = config.fixed_rows_per_request, 2 * hf_config.index_topk
    else:
        rows, default = config.base_rows_per_request, hf_config.index_topk
    rows = min(default if rows is None else rows, model.max_model_len)
    on_cuda = vllm_config.device_config.device_type == "cuda"
    key_bytes = indexer_key_bytes(hf_config.index_head_dim, None if on_cuda else model.dtype)
    plan = plan_pages(
        row_size * dtype.itemsize,
        key_bytes,
        _drafter_row_bytes(vllm_config),
        _DRAFT_BLOCK_MULTIPLES["cuda" if on_cuda else "cpu"],
    )
    return Geometry(
        config=config,
        row_size=row_size,
        dtype=dtype,
        num_layers=hf_config.num_hidden_layers,
        plan=plan,
        base_units=-(-rows // UNIT_ROWS),
        staging_rows=_staging_rows(vllm_config, config, hf_config.index_topk, on_cuda),
    )


def verifies_adaptively(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM chooses in each step how many drafts it verifies."""
    speculation = vllm_config.speculative_config
    return speculation is not None and bool(speculation.enable_adaptive_verification)


def has_draft_rings(vllm_config: "VllmConfig") -> bool:
    """Whether windowed layers of a drafter keep their KV in rings; elsewhere vLLM does."""
    default = "full" if vllm_config.device_config.device_type == "cuda" else "ring"
    return (dhisparse_config(vllm_config).draft_kv or default) == "ring"


def _drafter_row_bytes(vllm_config: "VllmConfig") -> int | None:
    """Return the bytes of a token's key and value in one draft layer, None without a drafter."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in DRAFTS_WITH_CACHE:
        return None
    draft = speculation.draft_model_config
    heads = draft.get_num_kv_heads(speculation.draft_parallel_config)
    return int(2 * heads * draft.get_head_size() * draft.dtype.itemsize)


def latent_row(
    cache_dtype: str, model_dtype: torch.dtype, latent_size: int, rope_size: int
) -> tuple[int, torch.dtype]:
    """Return values and dtype of a latent row.

    A row of ``fp8_ds_mla`` is bytes: the latent part as float8 e4m3, one float32 scale for
    each 128 of them, the rope part as bfloat16 (vLLM: ``MLAAttention.get_kv_cache_spec``).
    """
    if cache_dtype == FP8_ROWS:
        return latent_size + 4 * (latent_size // 128) + 2 * rope_size, torch.uint8
    return latent_size + rope_size, model_dtype


def indexer_key_bytes(head_size: int, model_dtype: torch.dtype | None) -> int:
    """Return the bytes of one indexer key: on CPU of the model's dtype; None, as on CUDA: float8.

    vLLM's indexer on CUDA keeps a float32 scale for each 128 values.
    """
    if model_dtype is None:
        return head_size + 4 * (head_size // 128)
    return head_size * model_dtype.itemsize


def num_index_groups(hf_config: Any) -> int:
    """Return how many layers have an indexer (vLLM: ``models/deepseek_v32/attention.py``)."""
    pattern = getattr(hf_config, "index_topk_pattern", None)
    offset = getattr(hf_config, "index_skip_topk_offset", 2)
    frequency = getattr(hf_config, "index_topk_freq", 1)
    layers = range(hf_config.num_hidden_layers)
    if pattern is None:
        return sum(max(layer - offset + 1, 0) % frequency == 0 for layer in layers)
    return sum(layer >= len(pattern) or pattern[layer] != "S" for layer in layers)


def _staging_rows(
    vllm_config: "VllmConfig", config: DHiSparseConfig, top_k: int, on_cuda: bool
) -> int:
    """By default a step that decodes or verifies all requests is one pass, where memory allows.

    Never more rows than the queries of a step select, or than its requests have. On CUDA a
    multiple of the pages that attention kernels read.
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
        if on_cuda:
            wanted = min(wanted, max(_CUDA_STAGING_ROWS, _captured_rows(vllm_config, top_k)))
    else:
        wanted = config.staging_rows
    if wanted < top_k:
        raise ValueError(
            f"dhisparse.staging_rows = {wanted} cannot hold the {top_k} rows that one query "
            "selects (index_topk); raise it"
        )
    if on_cuda and wanted < min(most, captured := _captured_rows(vllm_config, top_k)):
        raise ValueError(
            f"dhisparse.staging_rows = {wanted} cannot hold the {captured} rows that the largest "
            "batch of a whole graph may select; raise it, or lower --max-cudagraph-capture-size"
        )
    rows = max(top_k, min(wanted, most))
    return -(-rows // UNIT_ROWS) * UNIT_ROWS if on_cuda else rows


def _captured_rows(vllm_config: "VllmConfig", top_k: int) -> int:
    """Rows that the queries of the largest whole graph select: it cannot run in passes."""
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        return 0
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    drafts = 0 if speculation is None else speculation.num_speculative_tokens
    tokens = min(compilation.max_cudagraph_capture_size, scheduler.max_num_seqs * (1 + drafts))
    return int(tokens * top_k)
