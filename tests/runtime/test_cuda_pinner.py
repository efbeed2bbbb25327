"""Registration with CUDA, on a runtime that follows CUDA's rules but has no driver."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from vllm_dhisparse.runtime import cuda_pinner
from vllm_dhisparse.runtime.cuda_pinner import CudaPinner
from vllm_dhisparse.runtime.host_pool import HostPool

ALIAS = 1 << 40  # the device may see host memory elsewhere


class Runtime:
    """What CUDA documents of these calls; ``log`` holds them in order."""

    def __init__(self, devices=1, fail_at=None, copies_in_flight=False):
        self.devices, self.fail_at, self.copies_in_flight = devices, fail_at, copies_in_flight
        self.ranges, self.log = {}, []

    def getDeviceCount(self):
        return self.devices

    def hostRegister(self, pointer, size, flags):
        if len(self.ranges) == self.fail_at:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        assert size > 0
        assert all(
            pointer + size <= start or start + length <= pointer
            for start, (length, _) in self.ranges.items()
        ), "cudaErrorHostMemoryAlreadyRegistered"
        self.ranges[pointer] = size, flags
        self.log.append(("register", pointer))

    def hostUnregister(self, pointer):
        assert not self.copies_in_flight, "memory goes while a copy reads it"
        del self.ranges[pointer]
        self.log.append(("unregister", pointer))

    def pointerGetAttributes(self, pointer):
        assert any(start <= pointer < start + size for start, (size, _) in self.ranges.items())
        return SimpleNamespace(devicePointer=pointer + ALIAS, device=0)

    def deviceSynchronize(self):
        self.copies_in_flight = False
        self.log.append(("synchronize", None))


def make_pool(runtime, **settings):
    shape = {"num_layers": 2, "num_pages": 10, "page_rows": 64, "row_size": 656}
    settings = {"dtype": torch.uint8, "num_threads": 2, "max_chunk_bytes": 200_000, **settings}
    return HostPool(**shape, **settings, pinner=CudaPinner(runtime))


def test_every_chunk_is_registered_once_and_portable():
    runtime = Runtime()
    pool = make_pool(runtime)
    assert [pointer for _, pointer in runtime.log] == [chunk.address for chunk in pool.chunks]
    assert len(pool.chunks) == 6
    assert {flags for _, flags in runtime.ranges.values()} == {3}
    # 656 B x 64 rows x 10 pages are no power of two, and nothing is rounded up to one.
    assert sum(size for size, _ in runtime.ranges.values()) < 1.1 * 2 * 10 * 64 * 656


def test_kernels_get_the_addresses_that_the_device_sees():
    pool = make_pool(Runtime())
    expected = [chunk.address + ALIAS for chunk in pool.chunks]
    assert pool.device_addresses().tolist() == expected
    assert pool.device_addresses().dtype == torch.int64


def test_f40_the_pool_of_a_rank_names_no_device_of_its_own():
    """One process a rank: registrations hold in each context, and chunks carry no device."""
    pools = [make_pool(Runtime(devices=8)) for _ in range(2)]
    for pool in pools:
        assert not {"device", "rank"} & set(pool.chunks[0]._fields)
        assert {flags for _, flags in pool._pinner._runtime.ranges.values()} == {3}


@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_a_registration_that_fails_half_way_leaves_none(fail_at):
    runtime = Runtime(fail_at=fail_at)
    with pytest.raises(RuntimeError, match=r"cannot pin 0\.00 GiB .* out of memory.*ulimit -l"):
        make_pool(runtime)
    assert not runtime.ranges
    assert len(runtime.log) == 2 * fail_at


def test_f41_teardown_drains_first_and_can_be_repeated():
    runtime = Runtime()
    pool = make_pool(runtime)
    registered = [pointer for _, pointer in runtime.log]
    runtime.copies_in_flight = True
    pool.close()
    pool.close()
    unregistered = [("unregister", pointer) for pointer in reversed(registered)]
    assert runtime.log[len(registered) :] == [("synchronize", None), *unregistered]


def test_no_device_is_a_clear_error():
    with pytest.raises(RuntimeError, match="CuPy sees none"):
        CudaPinner(Runtime(devices=0))


def test_without_cupy_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy.cuda.runtime", raising=False)
    with pytest.raises(RuntimeError, match=r"needs CuPy .*vllm-dhisparse\[cuda13\] or \[cuda12\]"):
        CudaPinner()


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_real_cupy_without_a_driver_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device; tests/gpu registers memory with it")
    with pytest.raises(RuntimeError, match=r"CuPy reports: cudaError.*Update the NVIDIA driver"):
        CudaPinner()


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_has_every_call_that_the_pinner_makes():
    runtime = cuda_pinner._cupy_runtime()
    for name in vars(cuda_pinner.CudaRuntime):
        if not name.startswith("_"):
            assert hasattr(runtime, name), name
