"""The connector in vLLM's table, and the transfer configuration that selects it."""

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_dhisparse.integration.names import CONNECTOR


def register_connector() -> None:
    """Make the connector known by its name, once per process."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR, "vllm_dhisparse.integration.connector", "DHiSparseConnector"
        )


def transfer_config() -> KVTransferConfig:
    """Return what ``--kv-transfer-config`` would hold, so that users need not write it."""
    return KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")


def names_our_connector(config: Any) -> bool:
    """Whether a `KVTransferConfig` (or None) selects the connector of this package."""
    return config is not None and config.kv_connector == CONNECTOR
