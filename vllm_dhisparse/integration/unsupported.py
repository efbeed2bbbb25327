"""Stands in for the backend where this package cannot run, and says why."""

from typing import Any

from vllm.platforms import current_platform

from vllm_dhisparse.integration.compat import SUPPORTED, unsupported_reason

NO_PLATFORM = "DHISPARSE needs its own platform; unset VLLM_TARGET_DEVICE."
NO_DEVICE = "DHISPARSE runs on vLLM's builds for CPU and CUDA; this one is for {device}."


class UnsupportedBackend:
    """Refuses every configuration with the reason, through vLLM's own error."""

    @classmethod
    def validate_configuration(cls, *_args: Any, **_kwargs: Any) -> list[str]:
        """Return the reasons, as `AttentionBackend.validate_configuration` does."""
        device = current_platform.device_type
        if device not in SUPPORTED:
            return [NO_DEVICE.format(device=device)]
        return [unsupported_reason() or NO_PLATFORM]
