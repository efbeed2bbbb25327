"""What DHISPARSE cannot do on CUDA, beyond what it cannot do anywhere."""

from typing import TYPE_CHECKING

import torch

from vllm_dhisparse.integration.geometry import dhisparse_config, has_draft_rings
from vllm_dhisparse.integration.names import DRAFTS_WITH_CACHE

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def cuda_reasons(vllm_config: "VllmConfig") -> list[str]:
    """Return everything in ``vllm_config`` that cannot work on CUDA."""
    attention, model = vllm_config.attention_config, vllm_config.model_config
    reasons = []
    if model is not None and model.dtype is not torch.bfloat16:
        reasons.append(
            f"--dtype {str(model.dtype).removeprefix('torch.')}: vLLM's kernels for DSA models "
            "compute in bfloat16; use that"
        )
    if not vllm_config.use_v2_model_runner:
        reasons.append(
            "model runner V1 does not apply a step's commands before its graphs; remove "
            "VLLM_USE_V2_MODEL_RUNNER=0 and what makes vLLM fall back to V1 (see its warnings)"
        )
    if vllm_config.parallel_config.use_ubatching:
        reasons.append("dual batch overlap splits a step's union; remove --enable-dbo")
    if attention.hisparse_config is not None:
        reasons.append("HiSparse moves the same rows; remove its configuration")
    if attention.resolve_indexer_kv_dtype("fp8") != "fp8":
        reasons.append(
            "indexer keys of another dtype than fp8 have pages of another size; remove the option"
        )
    reasons += _drafts(vllm_config)
    if dhisparse_config(vllm_config).record_traces is not None:
        reasons.append(
            "dhisparse.record_traces reads selections on the host, which a graph cannot; record "
            "on vLLM's CPU build"
        )
    return reasons


def _drafts(vllm_config: "VllmConfig") -> list[str]:
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in DRAFTS_WITH_CACHE:
        return []
    reasons = []
    if has_draft_rings(vllm_config):
        reasons.append(
            "dhisparse.draft_kv ring: a captured graph would keep the tables of its first step; "
            "remove the key or set it to full"
        )
    if dhisparse_config(vllm_config).draft_window_tokens is not None:
        reasons.append("dhisparse.draft_window_tokens is for draft rings; remove it")
    if speculation.kv_cache_dtype not in (None, "auto", "bfloat16"):
        reasons.append(
            f"draft KV of dtype {speculation.kv_cache_dtype} has pages of another size than "
            "planned; remove kv_cache_dtype from --speculative-config"
        )
    return reasons
