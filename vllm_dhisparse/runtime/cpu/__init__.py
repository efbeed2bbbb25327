"""The CPU product, in numba and torch. See ``ops`` for the contracts."""

from vllm_dhisparse.runtime.cpu.attention import attend
from vllm_dhisparse.runtime.cpu.copies import publish, restore, retrieve
from vllm_dhisparse.runtime.cpu.mapping import apply, enter, host_rows
from vllm_dhisparse.runtime.cpu.resolution import resolve

__all__ = ["apply", "attend", "enter", "host_rows", "publish", "resolve", "restore", "retrieve"]
