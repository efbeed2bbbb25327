"""Memory that a step needs and the next step needs again."""

from math import prod
from typing import Any

import torch
from numpy.typing import NDArray

from vllm_dhisparse.runtime.host_memory import advise_huge_pages


class Scratch:
    """Named buffers that grow to the largest size asked for and are reused.

    The contents of a buffer last until its name is asked for again. On a device outgrown
    buffers stay: a captured graph may hold their addresses.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer ``name``, uninitialised, as a tensor of this shape."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(_next_power_of_two(size), dtype=dtype, device=self._device)
            if name in self._buffers and buffer.device.type != "cpu":
                self._outgrown.append(self._buffers[name])
            if buffer.device.type == "cpu":
                advise_huge_pages(buffer.data_ptr(), buffer.nbytes)
            self._buffers[name] = buffer
            self._arrays.pop(name, None)
        assert buffer.dtype == dtype, f"buffer {name} has another dtype"
        return buffer[:size].view(shape)

    def array(self, name: str, size: int, dtype: torch.dtype) -> NDArray[Any]:
        """Return the buffer ``name`` as an array of ``size``: ``take`` at a tenth of its time."""
        array = self._arrays.get(name)
        if array is None or array.size < size:
            self.take(name, size, dtype=dtype)
            array = self._arrays[name] = self._buffers[name].numpy()
        return array[:size]

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(buffer.nbytes for buffer in (*self._buffers.values(), *self._outgrown))


def _next_power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
