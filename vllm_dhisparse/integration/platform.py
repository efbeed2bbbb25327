"""vLLM's CPU platform with what DSA models under DHISPARSE need.

Nothing changes for configurations that do not choose DHISPARSE. vLLM loads this
module while it builds its own configuration classes, hence the late imports.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from vllm_dhisparse.integration.backend_registration import is_dhisparse
from vllm_dhisparse.integration.compat import unsupported_reason
from vllm_dhisparse.integration.names import LATENT_BLOCK_TOKENS
from vllm_dhisparse.integration.refusals import dhisparse_config, refuse_unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.dhisparse")


class DHiSparseCpuPlatform(CpuPlatform):
    """`CpuPlatform` that lets DHISPARSE serve sparse MLA layers."""

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

        from vllm_dhisparse.integration.connector_registration import (
            names_our_connector,
            transfer_config,
        )

        chosen = is_dhisparse(vllm_config.attention_config.backend)
        if not chosen and not names_our_connector(vllm_config.kv_transfer_config):
            super().check_and_update_config(vllm_config)
            return
        if chosen:
            if reason := unsupported_reason():
                raise ValueError(reason)
            refuse_unsupported(vllm_config)
            dhisparse_config(vllm_config)
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
        cache.block_size = LATENT_BLOCK_TOKENS

        compilation = vllm_config.compilation_config
        # The torch indexer follows the lengths of the batch, which no graph can hold.
        compilation.mode = CompilationMode.NONE
        # The C++ op takes the strided rope part of MLA's queries for a dense tensor: every
        # row after the first comes out wrong.
        compilation.custom_ops = [
            *(op for op in compilation.custom_ops if op[1:] != "rotary_embedding"),
            "-rotary_embedding",
        ]
        if vllm_config.kv_transfer_config is None:
            vllm_config.kv_transfer_config = transfer_config()
            logger.info("DHISPARSE: residency %s", dhisparse_config(vllm_config).residency)
