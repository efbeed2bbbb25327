"""How much memory this process may still use: the machine's, or less in a control group."""

from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUP = Path("/sys/fs/cgroup")


class _Group(NamedTuple):
    """Files of a control group's memory controller, and a line of its statistics."""

    limit: str
    usage: str
    statistics: str
    reclaimable: str


_GROUPS = (
    _Group("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Group(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


class GroupMemory(NamedTuple):
    """Memory of the process's control group in bytes: its limit, and what is left of it."""

    limit: int
    left: int


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory this process could still use, its control group's limit included."""
    available = int(psutil.virtual_memory().available)
    group = group_memory(cgroup)
    return available if group is None else min(available, group.left)


def group_memory(cgroup: Path = _CGROUP) -> GroupMemory | None:
    """Return the memory of the control group, None without a limit."""
    found = None
    for group in _GROUPS:
        try:
            limit = (cgroup / group.limit).read_text().strip()
            usage = int((cgroup / group.usage).read_text())
        except OSError:
            continue
        if limit != "max":
            usage -= _reclaimable_bytes(cgroup / group.statistics, group.reclaimable)
            memory = GroupMemory(int(limit), max(int(limit) - usage, 0))
            found = memory if found is None else min(found, memory, key=lambda each: each.left)
    return found


def _reclaimable_bytes(statistics: Path, name: str) -> int:
    """Return the use that ends when someone needs the memory: files once read, as weights."""
    try:
        lines = statistics.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
