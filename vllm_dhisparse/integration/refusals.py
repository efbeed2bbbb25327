"""What DHISPARSE cannot do, found before anything is built."""

from typing import TYPE_CHECKING

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.integration.cuda.refusals import cuda_reasons
from vllm_dhisparse.integration.draft_window import attends_to_all
from vllm_dhisparse.integration.geometry import dhisparse_config
from vllm_dhisparse.integration.names import (
    ARCHITECTURES,
    CONNECTOR,
    DRAFTS_WITH_CACHE,
    DRAFTS_WITHOUT_CACHE,
    FP8_ROWS,
    HOST_PAGES,
    KV_CACHE_DTYPES,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise one ValueError that lists everything in ``vllm_config`` that cannot work."""
    reasons = [
        *_model(vllm_config),
        *_memory(vllm_config),
        *_host_pages(vllm_config),
        *_parallelism(vllm_config),
        *_speculation(vllm_config),
        *(cuda_reasons(vllm_config) if _on_cuda(vllm_config) else ()),
    ]
    if reasons:
        raise ValueError(
            "--attention-backend DHISPARSE cannot run with this configuration:"
            + "".join(f"\n  - {reason}" for reason in reasons)
        )


def refuse_connector_alone(vllm_config: "VllmConfig") -> None:
    """Raise a ValueError where the user names the connector without the backend.

    A drafter's configuration, which has no backend either, comes with a speculation.
    """
    if vllm_config.speculative_config is None:
        raise ValueError(
            f"KV connector {CONNECTOR} works with --attention-backend DHISPARSE only, which "
            "brings it along; replace --kv-transfer-config by that option"
        )


def _model(vllm_config: "VllmConfig") -> list[str]:
    model = vllm_config.model_config
    if model is None:
        return []
    reasons = []
    if model.architecture not in ARCHITECTURES:
        reasons.append(
            f"model architecture {model.architecture} is not one of {', '.join(ARCHITECTURES)}; "
            "choose another --attention-backend for it"
        )
    elif not getattr(model.hf_text_config, "index_topk", None):
        reasons.append(
            "the model has no index_topk, or 0, so it is not a DSA model; "
            "choose another --attention-backend for it"
        )
    if model.runner_type != "generate":
        reasons.append(
            f"--runner {model.runner_type} does not decode, and nothing else reads history; "
            "choose another --attention-backend for it"
        )
    if model.enable_sleep_mode:
        reasons.append("sleep mode loses the device's KV cache; remove --enable-sleep-mode")
    if vllm_config.lora_config is not None:
        reason = (
            "LoRA was not tried with DHISPARSE"
            if _on_cuda(vllm_config)
            else "LoRA on mixture-of-experts layers needs Triton kernels, which vLLM's CPU build "
            "lacks"
        )
        reasons.append(f"{reason}; remove --enable-lora")
    return reasons


def _memory(vllm_config: "VllmConfig") -> list[str]:
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    reasons = []
    dtypes = (*KV_CACHE_DTYPES, FP8_ROWS) if _on_cuda(vllm_config) else KV_CACHE_DTYPES
    if cache.cache_dtype not in dtypes:
        reasons.append(f"--kv-cache-dtype {cache.cache_dtype} is not one of {', '.join(dtypes)}")
    elif cache.cache_dtype not in ("auto", FP8_ROWS) and _dtype(vllm_config) not in (
        None,
        cache.cache_dtype,
    ):
        reasons.append(
            f"--kv-cache-dtype {cache.cache_dtype}: rows keep the model's dtype, here "
            f"{_dtype(vllm_config)}; remove the option"
        )
    if cache.user_specified_block_size and cache.block_size != UNIT_ROWS:
        reasons.append(
            f"--block-size {cache.block_size}: a latent block holds {UNIT_ROWS} rows; "
            f"remove the option or set it to {UNIT_ROWS}"
        )
    if transfer is not None and transfer.kv_connector not in (None, CONNECTOR):
        reasons.append(
            f"KV connector {transfer.kv_connector} cannot run beside {CONNECTOR}; "
            "remove --kv-transfer-config"
        )
    if cache.kv_offloading_size is not None:
        reasons.append(
            "--kv-offloading-size puts a KV connector of vLLM's in the place of "
            f"{CONNECTOR}; remove it"
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        reasons.append(
            "latent and indexer layers need KV groups of their own; "
            "remove --disable-hybrid-kv-cache-manager"
        )
    return reasons


def _host_pages(vllm_config: "VllmConfig") -> list[str]:
    """Check what this package hands to its connector, should the user have set it."""
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    pages = extra.get(HOST_PAGES, 1)
    if isinstance(pages, int) and not isinstance(pages, bool) and pages > 0:
        return []
    return [
        f"{HOST_PAGES} = {pages!r} in --kv-transfer-config must be a whole number above 0; "
        "remove it and set dhisparse.host_pool_gib in --additional-config"
    ]


def _dtype(vllm_config: "VllmConfig") -> str | None:
    """Return the name of the model's dtype, None without a model."""
    model = vllm_config.model_config
    return None if model is None else str(model.dtype).removeprefix("torch.")


def _on_cuda(vllm_config: "VllmConfig") -> bool:
    return bool(vllm_config.device_config.device_type == "cuda")


def _parallelism(vllm_config: "VllmConfig") -> list[str]:
    parallel = vllm_config.parallel_config
    sizes = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    return [
        f"{option} {size} is not supported; set it to 1"
        for option, size in sizes.items()
        if size > 1
    ]


def _speculation(vllm_config: "VllmConfig") -> list[str]:
    speculation = vllm_config.speculative_config
    window = dhisparse_config(vllm_config).draft_window_tokens
    if speculation is None or speculation.method in DRAFTS_WITHOUT_CACHE:
        return ["dhisparse.draft_window_tokens needs a drafter; remove it"] if window else []
    if speculation.method not in DRAFTS_WITH_CACHE:
        return [
            f"speculative method {speculation.method} keeps draft KV that this package does not "
            f"place; use one of {', '.join(DRAFTS_WITH_CACHE + DRAFTS_WITHOUT_CACHE)}, or none"
        ]
    if speculation.draft_model_config.use_mla:
        return [
            f"drafter {speculation.draft_model_config.model} keeps latent rows; draft KV of "
            "ordinary attention layers only is supported"
        ]
    if window and not attends_to_all(speculation.draft_model_config.hf_config):
        return ["dhisparse.draft_window_tokens: the drafter's layers have windows; remove it"]
    return []
