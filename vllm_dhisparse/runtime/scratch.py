"""Memory that a step needs and the next step needs again."""

from math import prod

import torch


class Scratch:
    """Named buffers that grow to the largest size asked for and are reused.

    The contents of a buffer last until its name is asked for again.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer ``name``, uninitialised, as a tensor of this shape."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(_next_power_of_two(size), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        assert buffer.dtype == dtype, f"buffer {name} has another dtype"
        return buffer[:size].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def _next_power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
