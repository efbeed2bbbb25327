"""Anonymous host memory: huge pages, memory nodes, and populating it in parallel."""

import ctypes
import errno
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
SMALL_PAGE_BYTES = mmap.PAGESIZE
_HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE = 14, 15, 23  # advice of madvise(2)

_BIND = 2  # policy of mbind(2)
_MBIND_CALL = {"x86_64": 237, "aarch64": 235}  # libc has no function for it
_NODES = Path("/sys/devices/system/node")

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


def bind_to_node(memory: Memory, node: int) -> None:
    """Take all pages of a mapping, which was not touched yet, from one memory node.

    Raises:
        MemoryError: the node is smaller than the mapping.
        OSError: there is no such node, or the system does not let us choose.

    """
    call = _MBIND_CALL.get(platform.machine())
    folder = _NODES / f"node{node}"
    if call is None or not folder.exists():
        nodes = sorted(path.name for path in _NODES.glob("node[0-9]*"))
        raise OSError(errno.EINVAL, f"no memory node {node} to bind the host pool to; {nodes}")
    total = next(line for line in (folder / "meminfo").open() if "MemTotal" in line)
    if memory.size > int(total.split()[-2]) * 1024:
        raise _no_memory(memory.size)  # the kernel would kill the process instead
    if memory.size == 0:
        return
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    number_of_bits = 64 * len(words) + 1  # the kernel takes one less
    arguments = (memory.ctypes.data, memory.size, _BIND, words, number_of_bits, 0)
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if _libc.syscall(ctypes.c_long(call), *wide) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot bind the host pool to memory node {node}: {os.strerror(code)}")


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
