"""The MLA layer on CPU with this package's indexer in place of vLLM's CUDA one."""

from inspect import signature
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper

from vllm_dhisparse.integration.attention import (
    DHiSparseBackend,
    LatentPlan,
    planned_backend,
)
from vllm_dhisparse.integration.backend_registration import is_dhisparse
from vllm_dhisparse.integration.cpu_indexer import CpuIndexer, CpuIndexerCache
from vllm_dhisparse.integration.geometry import geometry

_LAYER = "MultiHeadLatentAttentionWrapper"


def backend_for(vllm_config: VllmConfig) -> type[DHiSparseBackend]:
    """Return the backend whose latent spec fits the engine's residency."""
    sizes = geometry(vllm_config)
    if sizes.config.residency == "resident":
        return planned_backend(LatentPlan(sizes.plan.resident_page_size_padded, None))
    return planned_backend(LatentPlan(sizes.plan.page_size_padded, sizes.base_units))


class DHiSparseMLAWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's MLA wrapper; under DHISPARSE its indexer computes with torch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = signature(super().__init__).bind(*args, **kwargs)
        modules: MLAModules = bound.arguments["mla_modules"]
        vllm_config = get_current_vllm_config()
        chosen = is_dhisparse(vllm_config.attention_config.backend) and modules.is_sparse
        if chosen and modules.indexer is not None:
            # The model has built the indexer and its parameters already carry their names
            # in the checkpoint, so the module must stay; only its methods change.
            modules.indexer.__class__ = CpuIndexer
            modules.indexer.k_cache.__class__ = CpuIndexerCache
        super().__init__(*args, **kwargs)
        if chosen:
            self.mla_attn.attn_backend = backend_for(vllm_config)


def register_layers() -> None:
    """Replace vLLM's MLA wrapper, once per process.

    Every process needs it, before the first layer is built: a worker never runs the
    platform's `check_and_update_config`.
    """
    if _LAYER not in op_registry_oot:
        PluggableLayer.register_oot(name=_LAYER)(DHiSparseMLAWrapper)
