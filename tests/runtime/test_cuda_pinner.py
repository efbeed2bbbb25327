"""Registration with CUDA, on a runtime that follows CUDA's rules but has no driver."""

import importlib.util
import sys

import pytest
import torch
from fake_cuda_runtime import FakeCudaRuntime

from vllm_dhisparse.runtime import cuda_pinner
from vllm_dhisparse.runtime.cuda_pinner import CudaPinner
from vllm_dhisparse.runtime.host_pool import HostPool

ALIAS = 1 << 40  # the device may see host memory elsewhere


def make_pool(runtime, **settings):
    shape = {"num_layers": 2, "num_pages": 10, "page_rows": 64, "row_size": 656}
    settings = {"dtype": torch.uint8, "num_threads": 2, "max_chunk_bytes": 200_000, **settings}
    return HostPool(**shape, **settings, pinner=CudaPinner(runtime))


def test_every_chunk_is_registered_once_and_portable():
    runtime = FakeCudaRuntime()
    pool = make_pool(runtime)
    assert [pointer for _, pointer in runtime.log] == [chunk.address for chunk in pool.chunks]
    assert len(pool.chunks) == 6
    assert {flags for _, flags in runtime.ranges.values()} == {3}
    # 656 B x 64 rows x 10 pages are no power of two, and nothing is rounded up to one.
    assert sum(size for size, _ in runtime.ranges.values()) < 1.1 * 2 * 10 * 64 * 656


def test_kernels_get_the_addresses_that_the_device_sees():
    pool = make_pool(FakeCudaRuntime(alias=ALIAS))
    tables = [pool.host_layer(layer).chunk_addresses for layer in range(2)]
    assert torch.cat(tables).tolist() == [chunk.address + ALIAS for chunk in pool.chunks]
    assert {table.dtype for table in tables} == {torch.int64}


def test_f40_the_pool_of_a_rank_names_no_device_of_its_own():
    """One process a rank: registrations hold in each context, and chunks carry no device."""
    pools = [make_pool(FakeCudaRuntime(devices=8)) for _ in range(2)]
    for pool in pools:
        assert not {"device", "rank"} & set(pool.chunks[0]._fields)
        assert {flags for _, flags in pool._pinner._runtime.ranges.values()} == {3}


@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_a_registration_that_fails_half_way_leaves_none(fail_at):
    runtime = FakeCudaRuntime(fail_at=fail_at)
    with pytest.raises(RuntimeError, match=r"cannot pin 0\.00 GiB .* out of memory.*ulimit -l"):
        make_pool(runtime)
    assert not runtime.ranges
    assert len(runtime.log) == 2 * fail_at


def test_f41_teardown_drains_first_and_can_be_repeated():
    runtime = FakeCudaRuntime()
    pool = make_pool(runtime)
    registered = [pointer for _, pointer in runtime.log]
    runtime.copies_in_flight = True
    pool.close()
    pool.close()
    unregistered = [("unregister", pointer) for pointer in reversed(registered)]
    assert runtime.log[len(registered) :] == [("synchronize", None), *unregistered]


def test_no_device_is_a_clear_error():
    with pytest.raises(RuntimeError, match="CuPy sees none"):
        CudaPinner(FakeCudaRuntime(devices=0))


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
