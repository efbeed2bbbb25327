"""Host memory: what there is, what a control group allows, what may be pinned."""

import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_dhisparse.doctor.finding import Finding, error, ok, warning
from vllm_dhisparse.runtime.available_memory import GroupMemory, available_bytes, group_memory

GIB = 2**30
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_memory(host_pool_gib: float | None, is_cuda: bool) -> Iterator[Finding]:
    """Compare a host pool of the given size (None = the default) with this machine."""
    pool_bytes = None if host_pool_gib is None else int(host_pool_gib * GIB)
    yield check_host_memory(pool_bytes, available_bytes())
    yield check_control_group(group_memory(), psutil.virtual_memory().total)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield check_locked_memory(pool_bytes, limit, is_cuda)
    yield check_huge_pages(HUGE_PAGES)
    if is_cuda:
        yield check_windows(platform.release())


def check_host_memory(pool_bytes: int | None, available: int) -> Finding:
    """The host pool must fit into what is available."""
    check, left = "host memory", f"{available / GIB:.1f} GiB available"
    if pool_bytes is None:
        if available < GIB:
            return warning(check, left, "the default pool is half of it at most; free some memory")
        return ok(check, f"{left}; name the pool you want with --host-pool-gib")
    wanted = f"a pool of {pool_bytes / GIB:g} GiB"
    if pool_bytes > available:
        return error(
            check, f"{wanted} is wanted, {left}", "lower dhisparse.host_pool_gib or add memory"
        )
    if pool_bytes > 0.9 * available:
        return warning(
            check,
            f"{wanted} leaves less than a tenth of {left}",
            "lower dhisparse.host_pool_gib: weights and the engine need memory too",
        )
    return ok(check, f"{wanted} fits, {left}")


def check_control_group(group: GroupMemory | None, machine_bytes: int) -> Finding:
    """On CPU vLLM sizes its KV cache by the machine, whatever the control group allows."""
    check = "control group"
    if group is None or group.limit >= machine_bytes:
        return ok(check, "no limit below the machine's memory")
    return warning(
        check,
        f"memory is limited to {group.limit / GIB:.1f} of {machine_bytes / GIB:.1f} GiB, "
        f"{group.left / GIB:.1f} GiB left; vLLM's CPU build sizes its KV cache by the machine",
        "set --kv-cache-memory-bytes (and dhisparse.host_pool_gib), or the kernel may end vLLM",
    )


def check_locked_memory(pool_bytes: int | None, limit: int, is_cuda: bool) -> Finding:
    """A pool that is registered with CUDA is locked in memory."""
    check = "locked memory"
    if limit == resource.RLIM_INFINITY:
        return ok(check, "unlimited")
    allowed = f"limited to {limit / GIB:.3f} GiB"
    if not is_cuda:
        return ok(check, f"{allowed}; without CUDA nothing is pinned")
    if pool_bytes is not None and pool_bytes <= limit:
        return ok(check, allowed)
    return warning(
        check,
        f"{allowed}, which may be less than the host pool that CUDA pins",
        "ulimit -l unlimited (containers: --ulimit memlock=-1)",
    )


def check_huge_pages(setting: Path) -> Finding:
    """The pool asks for 2 MiB pages, which keep address translation cheap."""
    check = "huge pages"
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ok(check, "the kernel does not say")
    if chosen == "never":
        return warning(
            check, f"{setting} is 'never'", f"as root: echo madvise > {setting} (speed only)"
        )
    return ok(check, chosen)


def check_windows(kernel: str) -> Finding:
    """Under Windows the driver limits how much memory can be pinned."""
    check = "Windows subsystem"
    if "microsoft" not in kernel.lower():
        return ok(check, "not used")
    return warning(
        check,
        f"kernel {kernel}: the driver may pin much less memory than there is",
        "lower dhisparse.host_pool_gib where registering the pool fails, or use Linux itself",
    )
