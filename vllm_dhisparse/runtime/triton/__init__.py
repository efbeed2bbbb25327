"""The GPU product, in Triton. See ``ops`` for the contracts.

Nothing here waits for the device, and grids and buffers depend on shapes alone, so that a
CUDA graph may hold a step; the one exception is a union that may be larger than staging,
see ``resolution``. What other implementations assert, kernels leave out and note in
``Tables.errors``; ``raise_errors`` looks there, ``raise_word`` says what it holds.
"""

from vllm_dhisparse.runtime.triton.attention import attend
from vllm_dhisparse.runtime.triton.commands import apply
from vllm_dhisparse.runtime.triton.copies import publish, restore, retrieve, retrieve_in_place
from vllm_dhisparse.runtime.triton.errors import raise_errors, raise_word
from vllm_dhisparse.runtime.triton.mapping import enter, host_rows
from vllm_dhisparse.runtime.triton.measuring import (
    count_hits,
    note_ages,
    start_clock,
    stop_clock,
)
from vllm_dhisparse.runtime.triton.resolution import resolve

__all__ = [
    "apply",
    "attend",
    "count_hits",
    "enter",
    "host_rows",
    "note_ages",
    "publish",
    "raise_errors",
    "raise_word",
    "resolve",
    "restore",
    "retrieve",
    "retrieve_in_place",
    "start_clock",
    "stop_clock",
]
