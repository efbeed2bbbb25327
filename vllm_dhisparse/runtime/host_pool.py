"""Host memory for the latent rows of all layers.

One anonymous mapping, layer after layer, each layer on a 2 MiB boundary. It is pinned
in chunks of at most 64 GiB, because one registration of 512 GiB or more always fails.

The data plane gets one layer as a ``HostLayer``. The host reads ``pages``. Kernels read
through ``chunk_addresses``: host row ``r`` of the layer is the ``row_bytes`` bytes at
``chunk_addresses[r // chunk_rows] + r % chunk_rows * row_bytes``, where an address is what
``Pinner.device_address`` says. No chunk crosses a layer, all chunks of a layer but its last
have ``chunk_rows`` rows, and the table stays at its address as long as the pool lives, so
that captured graphs may read it.
"""

import os
from collections.abc import Iterator
from math import gcd
from typing import NamedTuple, Protocol

import torch

from vllm_dhisparse.runtime.host_memory import (
    HUGE_PAGE_BYTES,
    SMALL_PAGE_BYTES,
    bind_to_node,
    map_memory,
    populate,
    round_up,
)

MAX_CHUNK_BYTES = 64 << 30
_POISON = 0xFF  # NaN in every float format


class Pinner(Protocol):
    """Makes host memory readable by the device."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Register a range; raises and leaves nothing registered when it cannot."""

    def unpin(self, address: int) -> None:
        """Undo ``pin`` of the range that starts at ``address``."""

    def drain(self) -> None:
        """Wait until no copy can touch pinned memory any more."""

    def device_address(self, address: int) -> int:
        """Where the device sees a pinned host address."""


class NoPinner:
    """Leaves memory pageable: for devices that read host memory as their own."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Do nothing."""

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def drain(self) -> None:
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


class HostLayer(NamedTuple):
    """Home of one layer's rows, see above.

    ``pages``: [num_pages, page_rows, row_size], contiguous - as the host reads it;
    ``chunk_addresses``: [chunks] int64, on the device - where the device sees each chunk;
    ``chunk_rows``: host rows of every chunk but the last.
    """

    pages: torch.Tensor
    chunk_addresses: torch.Tensor
    chunk_rows: int

    @classmethod
    def of(cls, pages: torch.Tensor) -> "HostLayer":
        """Wrap pages whose address is the same for host and device, as one chunk."""
        address = torch.tensor([pages.data_ptr()], dtype=torch.int64)
        return cls(pages, address, max(1, pages.shape[0] * pages.shape[1]))


class HostPool:
    """Host pages of every layer, [num_pages, page_rows, row_size] each.

    ``device`` is where the tables of chunk addresses lie. Raises MemoryError when the machine
    (or memory node ``numa_node``, where one is given) does not have the memory, OSError when
    it cannot be bound to the node, and what the pinner raises when a chunk cannot be pinned;
    nothing stays pinned then.
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
        device: torch.device | str = "cpu",
        huge_pages: bool = True,
        numa_node: int | None = None,
        poisoned: bool = False,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        num_threads: int | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_bytes = page_rows * row_size * dtype.itemsize
        self.layer_bytes = round_up(num_pages * self.page_bytes, HUGE_PAGE_BYTES)
        self._pinner = pinner or NoPinner()
        self._pinned: list[Chunk] = []
        memory = map_memory(num_layers * self.layer_bytes)
        if numa_node is not None:
            bind_to_node(memory, numa_node)
        populate(memory, huge_pages, num_threads or min(32, os.cpu_count() or 1))
        if poisoned:
            memory.fill(_POISON)
        self._layers = [
            torch.from_numpy(memory[index * self.layer_bytes :][: num_pages * self.page_bytes])
            .view(dtype)
            .view(num_pages, page_rows, row_size)
            for index in range(num_layers)
        ]
        # Registrations must not share a page of the operating system.
        step = SMALL_PAGE_BYTES // gcd(self.page_bytes, SMALL_PAGE_BYTES)
        self._chunk_pages = max(step, max_chunk_bytes // self.page_bytes // step * step)
        try:
            for chunk in self._plan_chunks():
                self._pinner.pin(chunk.address, chunk.num_bytes)
                self._pinned.append(chunk)
            self._addresses = [self._address_table(index, device) for index in range(num_layers)]
        except BaseException:
            self._unpin_all()
            raise

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All pinned chunks, by layer and page."""
        return tuple(self._pinned)

    def layer(self, index: int) -> torch.Tensor:
        """Pages of one layer: [num_pages, page_rows, row_size], contiguous."""
        return self._layers[index]

    def host_layer(self, index: int) -> HostLayer:
        """One layer as the data plane takes it."""
        pages = self._layers[index]
        return HostLayer(pages, self._addresses[index], self._chunk_pages * pages.shape[1])

    def close(self) -> None:
        """Unpin everything, last chunk first, and let go of the memory. Safe to repeat.

        Copies in flight end first. The mapping itself ends with the last view that a caller
        still holds.
        """
        if self._pinned:
            self._pinner.drain()
        self._unpin_all()

    def _unpin_all(self) -> None:
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

    def _plan_chunks(self) -> Iterator[Chunk]:
        for index, layer in enumerate(self._layers):
            for first in range(0, self.num_pages, self._chunk_pages):
                pages = min(self._chunk_pages, self.num_pages - first)
                address = layer.data_ptr() + first * self.page_bytes
                num_bytes = round_up(pages * self.page_bytes, SMALL_PAGE_BYTES)
                yield Chunk(index, first, pages, address, num_bytes)

    def _address_table(self, layer: int, device: torch.device | str) -> torch.Tensor:
        chunks = [chunk for chunk in self._pinned if chunk.layer == layer]
        addresses = [self._pinner.device_address(chunk.address) for chunk in chunks]
        return torch.tensor(addresses, dtype=torch.int64, device=device)
