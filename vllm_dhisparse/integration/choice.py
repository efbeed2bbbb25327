"""What choosing DHISPARSE does to an engine's configuration, on every platform."""

from typing import TYPE_CHECKING

from vllm_dhisparse.integration.backend_registration import is_dhisparse
from vllm_dhisparse.integration.compat import unsupported_reason
from vllm_dhisparse.integration.connector_registration import names_our_connector, transfer_config
from vllm_dhisparse.integration.geometry import geometry
from vllm_dhisparse.integration.host_budget import host_pages
from vllm_dhisparse.integration.names import HOST_PAGES
from vllm_dhisparse.integration.refusals import refuse_connector_alone, refuse_unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def checked_choice(vllm_config: "VllmConfig") -> bool | None:
    """Return whether DHISPARSE is chosen; None where nothing of it is in the configuration.

    False means a drafter's configuration. It arrives in the platform's hook a second time:
    without a backend, but with the target's scheduler, cache and transfer configuration,
    the last of which names our connector.

    Raises:
        ValueError: DHISPARSE cannot work with this configuration or this vLLM.

    """
    if is_dhisparse(vllm_config.attention_config.backend):
        if reason := unsupported_reason():
            raise ValueError(reason)
        refuse_unsupported(vllm_config)
        return True
    if not names_our_connector(vllm_config.kv_transfer_config):
        return None
    refuse_connector_alone(vllm_config)
    return False


def add_connector(vllm_config: "VllmConfig") -> None:
    """Check the settings and add the connector, with what all processes must agree on."""
    sizes = geometry(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        vllm_config.kv_transfer_config = transfer = transfer_config()
    if sizes.config.residency != "resident":
        extra = transfer.kv_connector_extra_config
        extra.setdefault(HOST_PAGES, host_pages(vllm_config, sizes))
