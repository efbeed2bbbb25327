"""Stands in for the backend where this package cannot run, and says why."""

from typing import Any

from vllm.platforms import current_platform

from vllm_dhisparse.integration.compat import unsupported_reason

NO_PLATFORM = "DHISPARSE needs its own platform; unset VLLM_TARGET_DEVICE."
NO_CUDA = "DHISPARSE runs on vLLM's CPU build only; its CUDA data plane is not released yet."


class UnsupportedBackend:
    """Refuses every configuration with the reason, through vLLM's own error."""

    @classmethod
    def validate_configuration(cls, *_args: Any, **_kwargs: Any) -> list[str]:
        """Return the reasons, as `AttentionBackend.validate_configuration` does."""
        return [NO_CUDA if not current_platform.is_cpu() else unsupported_reason() or NO_PLATFORM]
