"""Entry points: what vLLM calls in every process before it builds anything."""

import logging
from importlib import import_module

from vllm_dhisparse.integration.v2_runner import prepare_process

logger = logging.getLogger("vllm.dhisparse")

_PLATFORM = "vllm_dhisparse.integration.platform.DHiSparseCpuPlatform"
_BACKEND = "vllm_dhisparse.integration.attention.DHiSparseBackend"
_UNSUPPORTED = "vllm_dhisparse.integration.unsupported.UnsupportedBackend"


def register() -> None:
    """Make DHISPARSE known to vLLM. May run many times; never raises.

    vLLM calls this unguarded even for ``vllm --help``, so a failure here would break
    every command of a user who does not use DHISPARSE.
    """
    try:
        _register()
    except Exception as error:
        logger.warning("vllm-dhisparse is installed but could not be set up: %s", error)


def platform() -> str | None:
    """Return the platform class for machines without a GPU, None elsewhere."""
    try:
        from vllm.platforms import cpu_platform_plugin

        if cpu_platform_plugin() is None:
            return None
        prepare_process()
        import_module(_PLATFORM.rpartition(".")[0])  # fails here rather than in vLLM
        return _PLATFORM
    except Exception as error:
        logger.warning("vllm-dhisparse found no platform: %s", error)
        return None


def _register() -> None:
    from vllm.platforms import current_platform

    from vllm_dhisparse.integration.backend_registration import register_backend
    from vllm_dhisparse.integration.compat import unsupported_reason

    if not current_platform.is_cpu():
        register_backend(_UNSUPPORTED)
        return
    reason = unsupported_reason()
    if reason is None and type(current_platform).__name__ != _PLATFORM.rpartition(".")[2]:
        reason = "vLLM uses another platform; unset VLLM_TARGET_DEVICE to choose DHISPARSE"
    if reason is not None:
        logger.warning("vllm-dhisparse is not available: %s", reason)
        register_backend(_UNSUPPORTED)
        return

    from vllm_dhisparse.integration.connector_registration import register_connector
    from vllm_dhisparse.integration.cpu_layers import register_layers
    from vllm_dhisparse.integration.draft_ring import register_ring_spec
    from vllm_dhisparse.integration.manager import register_latent_spec
    from vllm_dhisparse.integration.speculators import register_speculators

    register_backend(_BACKEND)
    register_connector()
    register_layers()
    register_latent_spec()
    register_ring_spec()
    register_speculators()
