"""The name DHISPARSE in vLLM's table of attention backends."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dhisparse.integration.names import BACKEND


def register_backend(path: str) -> None:
    """Add DHISPARSE to the table, once per process."""
    if BACKEND in AttentionBackendEnum.__members__:
        return
    member = AttentionBackendEnum.register(BACKEND, path)
    # Enum members pickle by value, and a spawned engine unpickles its VllmConfig before
    # it loads plugins. Pickle finds this on the instance and calls _load_member there.
    member.__reduce_ex__ = lambda _protocol: (_load_member, (path,))


def _load_member(path: str) -> AttentionBackendEnum:
    register_backend(path)
    return AttentionBackendEnum[BACKEND]


def is_dhisparse(backend: Any) -> bool:
    """Whether ``backend`` (a member of the table, or None) is DHISPARSE."""
    return getattr(backend, "name", None) == BACKEND
