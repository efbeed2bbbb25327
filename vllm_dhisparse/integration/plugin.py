"""Entry points: what vLLM calls in every process before it builds anything."""

import logging
from importlib import import_module

from vllm_dhisparse.integration.v2_runner import prepare_process

logger = logging.getLogger("vllm.dhisparse")

_PLATFORMS = {
    "cpu": "vllm_dhisparse.integration.platform.DHiSparseCpuPlatform",
    "cuda": "vllm_dhisparse.integration.cuda.platform.DHiSparseCudaPlatform",
}
_BACKENDS = {
    "cpu": "vllm_dhisparse.integration.attention.DHiSparseBackend",
    "cuda": "vllm_dhisparse.integration.cuda.backend.CudaBackend",
}
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
    """Return the platform class for the device that vLLM was built for, None for others."""
    try:
        from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

        for device, finds in (("cuda", cuda_platform_plugin), ("cpu", cpu_platform_plugin)):
            if finds() is not None:
                if device == "cpu":
                    prepare_process()
                path = _PLATFORMS[device]
                import_module(path.rpartition(".")[0])  # fails here rather than in vLLM
                return path
    except Exception as error:
        logger.warning("vllm-dhisparse found no platform: %s", error)
    return None


def _register() -> None:
    from vllm.platforms import current_platform

    from vllm_dhisparse.integration.backend_registration import register_backend
    from vllm_dhisparse.integration.compat import unsupported_reason

    device = current_platform.device_type
    if device not in _PLATFORMS:
        register_backend(_UNSUPPORTED)
        return
    reason = unsupported_reason()
    if reason is None and type(current_platform).__name__ != _PLATFORMS[device].rpartition(".")[2]:
        reason = "vLLM uses another platform; unset VLLM_TARGET_DEVICE to choose DHISPARSE"
    if reason is not None:
        logger.warning("vllm-dhisparse is not available: %s", reason)
        register_backend(_UNSUPPORTED)
        return

    from vllm_dhisparse.integration.connector_registration import register_connector
    from vllm_dhisparse.integration.manager import register_latent_spec
    from vllm_dhisparse.integration.speculators import register_speculators

    register_backend(_BACKENDS[device])
    register_connector()
    register_latent_spec()
    register_speculators()
    if device == "cpu":
        from vllm_dhisparse.integration.cpu_layers import register_layers
        from vllm_dhisparse.integration.draft_ring import register_ring_spec

        register_layers()
        register_ring_spec()
