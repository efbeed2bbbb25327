"""Pinning host memory with CUDA, through CuPy. The only module that imports cupy."""

from importlib import import_module
from typing import Any, Protocol

# cudaHostRegisterPortable (known to every context, whichever device is current) and
# cudaHostRegisterMapped, which CuPy does not name.
_PORTABLE, _MAPPED = 1, 2
_INSTALL = "install the extra of torch's CUDA version, vllm-dhisparse[cuda13] or [cuda12]"


class CudaRuntime(Protocol):
    """What is used of ``cupy.cuda.runtime``; its errors are RuntimeErrors.

    CuPy clears the error that a failed call leaves pending in the CUDA runtime.
    """

    def getDeviceCount(self) -> int:
        """Return how many devices there are; raises without a driver."""

    def hostRegister(self, pointer: int, size: int, flags: int) -> None:
        """Pin a range."""

    def hostUnregister(self, pointer: int) -> None:
        """Unpin the range that starts at ``pointer``."""

    def pointerGetAttributes(self, pointer: int) -> Any:
        """Return ``devicePointer`` and more of a pinned address."""

    def deviceSynchronize(self) -> None:
        """Wait for all work of the current device."""


class CudaPinner:
    """Registers host memory, so that kernels of every device read it at its own address.

    Args:
        runtime: in place of ``cupy.cuda.runtime``.

    Raises:
        RuntimeError: CuPy is not installed, or finds no CUDA driver or device.

    """

    def __init__(self, runtime: CudaRuntime | None = None) -> None:
        self._runtime = runtime or _cupy_runtime()
        try:
            devices = self._runtime.getDeviceCount()
        except RuntimeError as error:
            raise RuntimeError(
                f"the host pool needs a CUDA device, but CuPy reports: {error}. Update the "
                f"NVIDIA driver, or {_INSTALL}"
            ) from error
        if devices < 1:
            raise RuntimeError("the host pool needs a CUDA device, but CuPy sees none")

    def pin(self, address: int, num_bytes: int) -> None:
        """Register a range. Raises RuntimeError that says what limits may be in the way."""
        try:
            self._runtime.hostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        except RuntimeError as error:
            raise RuntimeError(
                f"cannot pin {num_bytes / 2**30:.2f} GiB of host memory: {error}. Lower "
                "dhisparse.host_pool_gib, or raise the limits of locked memory (ulimit -l) and "
                "of the control group; WSL and Linux 6.11 to 6.13 have limits of their own"
            ) from error

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self._runtime.hostUnregister(address)

    def drain(self) -> None:
        """Wait until no kernel or copy of this process can touch pinned memory."""
        self._runtime.deviceSynchronize()

    def device_address(self, address: int) -> int:
        """Return the address for kernels: by CUDA's word, not by assuming that they are equal."""
        return int(self._runtime.pointerGetAttributes(address).devicePointer)


def _cupy_runtime() -> CudaRuntime:
    try:
        runtime: CudaRuntime = import_module("cupy.cuda.runtime")
    except ImportError as error:
        raise RuntimeError(f"the host pool on CUDA needs CuPy ({error}): {_INSTALL}") from error
    return runtime
