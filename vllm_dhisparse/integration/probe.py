"""Loads the plugin as vLLM does, in this process and in a spawned one; for ``doctor``.

Prints one JSON object: vLLM's version, the platform, and in both processes the class
behind the name DHISPARSE, why it refuses to work, and whether the connector is known.
"""

import json
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dhisparse.integration.names import BACKEND, CONNECTOR
from vllm_dhisparse.integration.unsupported import UnsupportedBackend


def probe() -> dict[str, Any]:
    """Return what this process sees, and what a spawned one does."""
    load_general_plugins()
    member = AttentionBackendEnum.__members__.get(BACKEND)
    seen = {
        "vllm": vllm.__version__,
        "platform": type(current_platform).__name__,
        "here": _seen(member),
        "spawned": None,
    }
    if member is not None:
        # As with vLLM's engine, the name arrives before the process has loaded any plugin.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_answer, args=(theirs, member))
        child.start()
        theirs.close()
        try:
            seen["spawned"] = ours.recv()
        except EOFError:
            seen["spawned"] = None
        child.join()
    return seen


def _answer(connection: "Connection[Any, Any]", member: AttentionBackendEnum) -> None:
    load_general_plugins()
    connection.send(_seen(member))


def _seen(member: AttentionBackendEnum | None) -> dict[str, Any]:
    path = None if member is None else member.get_path()
    is_refused = path is not None and path.endswith(f".{UnsupportedBackend.__name__}")
    return {
        "backend": path,
        "refusal": " ".join(UnsupportedBackend.validate_configuration()) if is_refused else None,
        "connector": CONNECTOR in KVConnectorFactory._registry,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
