"""Host memory for the latent rows of all layers.

One anonymous mapping, layer after layer, each layer on a 2 MiB boundary. It is pinned
in chunks of at most 64 GiB, because one registration of 512 GiB or more always fails.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
import torch

HUGE_PAGE_BYTES = 2 << 20
MAX_CHUNK_BYTES = 64 << 30
_SMALL_PAGE_BYTES = 4096
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 14, 15, 23
_POISON = 0xFF  # NaN in every float format

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Pinner(Protocol):
    """Makes host memory readable by the device."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Register a range; raises and leaves nothing registered when it cannot."""

    def unpin(self, address: int) -> None:
        """Undo ``pin`` of the range that starts at ``address``."""

    def device_address(self, address: int) -> int:
        """Where the device sees a pinned host address."""


class NoPinner:
    """Leaves memory pageable: for devices that read host memory as their own."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Do nothing."""

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def device_address(self, address: int) -> int:
        """Return ``address`` itself."""
        return address


class Chunk(NamedTuple):
    """One registration: pages ``first_page .. first_page + num_pages`` of one layer."""

    layer: int
    first_page: int
    num_pages: int
    address: int
    num_bytes: int


class HostPool:
    """Host pages of every layer, [num_pages, page_rows, row_size] each.

    Raises MemoryError when the machine does not have the memory, and what the pinner
    raises when a chunk cannot be pinned; either way nothing stays pinned.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_rows: int,
        row_size: int,
        dtype: torch.dtype,
        *,
        pinner: Pinner | None = None,
        huge_pages: bool = True,
        poisoned: bool = False,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        num_threads: int | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_bytes = page_rows * row_size * dtype.itemsize
        self.layer_bytes = _round_up(num_pages * self.page_bytes, HUGE_PAGE_BYTES)
        self._pinner = pinner or NoPinner()
        self._pinned: list[Chunk] = []
        memory = _map(num_layers * self.layer_bytes)
        _populate(memory, huge_pages, num_threads or min(32, os.cpu_count() or 1))
        if poisoned:
            memory.fill(_POISON)
        self._layers = [
            torch.from_numpy(memory[index * self.layer_bytes :][: num_pages * self.page_bytes])
            .view(dtype)
            .view(num_pages, page_rows, row_size)
            for index in range(num_layers)
        ]
        try:
            for chunk in self._plan_chunks(max_chunk_bytes):
                self._pinner.pin(chunk.address, chunk.num_bytes)
                self._pinned.append(chunk)
        except BaseException:
            self.close()
            raise

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All pinned chunks, by layer and page."""
        return tuple(self._pinned)

    def layer(self, index: int) -> torch.Tensor:
        """Pages of one layer: [num_pages, page_rows, row_size], contiguous."""
        return self._layers[index]

    def device_addresses(self) -> torch.Tensor:
        """[chunks] int64 - where the device sees each chunk."""
        addresses = [self._pinner.device_address(chunk.address) for chunk in self._pinned]
        return torch.tensor(addresses, dtype=torch.int64)

    def close(self) -> None:
        """Unpin everything, last chunk first, and let go of the memory. Safe to repeat.

        The mapping itself ends with the last view that a caller still holds.
        """
        while self._pinned:
            self._pinner.unpin(self._pinned.pop().address)
        self._layers = []

    def check_integrity(self) -> None:
        """Assert that the chunks cover every page of every layer once, in order."""
        for index, layer in enumerate(self._layers):
            pages = [chunk for chunk in self._pinned if chunk.layer == index]
            next_page = 0
            for chunk in pages:
                assert chunk.first_page == next_page, "a gap between two chunks"
                assert chunk.address == layer.data_ptr() + next_page * self.page_bytes
                next_page += chunk.num_pages
            assert next_page == self.num_pages, "pages outside all chunks"

    def _plan_chunks(self, max_chunk_bytes: int) -> Iterator[Chunk]:
        # Registrations must not share a page of the operating system.
        step = _SMALL_PAGE_BYTES // gcd(self.page_bytes, _SMALL_PAGE_BYTES)
        chunk_pages = max(step, max_chunk_bytes // self.page_bytes // step * step)
        for index, layer in enumerate(self._layers):
            for first in range(0, self.num_pages, chunk_pages):
                pages = min(chunk_pages, self.num_pages - first)
                address = layer.data_ptr() + first * self.page_bytes
                num_bytes = _round_up(pages * self.page_bytes, _SMALL_PAGE_BYTES)
                yield Chunk(index, first, pages, address, num_bytes)


def _map(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if num_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    try:
        mapping = mmap.mmap(
            -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:
        raise _no_memory(num_bytes) from error
    memory = np.frombuffer(mapping, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes]


def _populate(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], huge_pages: bool, num_threads: int
) -> None:
    if memory.size == 0:
        return
    address = memory.ctypes.data
    _libc.madvise(address, memory.size, _MADV_HUGEPAGE if huge_pages else _MADV_NOHUGEPAGE)
    share = _round_up(-(-memory.size // num_threads), HUGE_PAGE_BYTES)

    def touch(start: int) -> None:
        part = memory[start : start + share]
        if _libc.madvise(address + start, part.size, _MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() in (12, 14):  # ENOMEM, EFAULT
            raise _no_memory(memory.size)
        part[::_SMALL_PAGE_BYTES] = 0  # kernels before 5.14 do not know the advice

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(touch, range(0, memory.size, share)))


def _no_memory(num_bytes: int) -> MemoryError:
    gib = num_bytes / 2**30
    return MemoryError(f"no {gib:.1f} GiB of host memory for the KV history; lower host_pool_gib")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
