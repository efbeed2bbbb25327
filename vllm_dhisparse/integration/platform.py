"""vLLM's CPU platform with what DSA models under DHISPARSE need.

Nothing changes for configurations that do not choose DHISPARSE. vLLM loads this
module while it builds its own configuration classes, hence the late imports.
"""

import sys
from typing import TYPE_CHECKING, Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.integration.backend_registration import is_dhisparse
from vllm_dhisparse.integration.v2_runner import choose_runner, forget_runner, is_armed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


# vLLM has a platform of its own for some CPUs.
_StockPlatform: Any = resolve_obj_by_qualname(
    cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform"
)


class DHiSparseCpuPlatform(_StockPlatform):
    """vLLM's CPU platform, which lets DHISPARSE serve sparse MLA layers."""

    # Where Triton is there, torch's own compiler asks it for a code generator of this machine,
    # which an interpreter has not.
    simple_compile_backend = "eager" if is_armed() else _StockPlatform.simple_compile_backend

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """Return the backend's class path; stock vLLM refuses sparse layers on CPU."""
        if is_dhisparse(selected_backend) and attn_selector_config.use_sparse:
            return selected_backend.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse what cannot work, then set what DHISPARSE needs.

        A drafter's configuration arrives here a second time: without a backend, but
        with the target's scheduler, cache and transfer configuration. It is known by
        the last of these.
        """
        from vllm.config import CompilationMode

        from vllm_dhisparse.integration.choice import add_connector, checked_choice

        chosen = checked_choice(vllm_config)
        if chosen is None:
            forget_runner()
            super().check_and_update_config(vllm_config)
            return
        if chosen:
            choose_runner(vllm_config)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        # Stock vLLM's CPU kernels for dense MLA need blocks of 16 tokens and whole
        # prompts. Ours do not, so these settings stay as the user (or vLLM) chose them.
        chunked_prefill = scheduler.enable_chunked_prefill
        max_batched_tokens = scheduler.max_num_batched_tokens
        prefix_caching = cache.enable_prefix_caching
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill = chunked_prefill
        scheduler.max_num_batched_tokens = max_batched_tokens
        cache.enable_prefix_caching = prefix_caching
        cache.block_size = UNIT_ROWS

        compilation = vllm_config.compilation_config
        # The torch indexer follows the lengths of the batch, which no graph can hold.
        compilation.mode = CompilationMode.NONE
        # The C++ op takes the strided rope part of MLA's queries for a dense tensor: every
        # row after the first comes out wrong.
        compilation.custom_ops = [
            *(op for op in compilation.custom_ops if op[1:] != "rotary_embedding"),
            "-rotary_embedding",
        ]
        if chosen and vllm_config.model_config is not None:
            add_connector(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return vLLM's communicator with what data parallelism needs besides."""
        return "vllm_dhisparse.integration.cpu_communicator.UnequalCpuCommunicator"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace vLLM's Triton kernels by C++ ones, also where numba is loaded already.

        vLLM looks through the attributes of all loaded modules, and one object of llvmlite
        takes every attribute name for that of a native function.
        """
        hidden = sys.modules.pop("llvmlite.binding.ffi", None)
        try:
            super().register_triton_kernel_overrides()
        finally:
            if hidden is not None:
                sys.modules["llvmlite.binding.ffi"] = hidden
