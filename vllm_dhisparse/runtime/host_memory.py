"""Anonymous host memory: huge pages, and populating it in parallel."""

import ctypes
import errno
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
SMALL_PAGE_BYTES = mmap.PAGESIZE
_HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE = 14, 15, 23  # advice of madvise(2)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Memory: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


def map_memory(num_bytes: int) -> Memory:
    """Map memory on a 2 MiB boundary. Raises MemoryError; it ends with its last view."""
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


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages in a range that was not touched yet; a small range is left alone."""
    first = round_up(address, HUGE_PAGE_BYTES)
    last = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < last:
        _libc.madvise(first, last - first, _HUGEPAGE)


def populate(memory: Memory, huge_pages: bool, num_threads: int) -> None:
    """Make all of a mapping present, in parallel. Raises MemoryError."""
    if memory.size == 0:
        return
    address = memory.ctypes.data
    _libc.madvise(address, memory.size, _HUGEPAGE if huge_pages else _NOHUGEPAGE)
    share = round_up(-(-memory.size // num_threads), HUGE_PAGE_BYTES)

    def touch(start: int) -> None:
        part = memory[start : start + share]
        if _libc.madvise(address + start, part.size, _POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
            raise _no_memory(memory.size)
        part[::SMALL_PAGE_BYTES] = 0  # kernels before 5.14 do not know the advice

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(touch, range(0, memory.size, share)))


def _no_memory(num_bytes: int) -> MemoryError:
    gib = num_bytes / 2**30
    return MemoryError(f"no {gib:.1f} GiB of host memory for the KV history; lower host_pool_gib")


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple
