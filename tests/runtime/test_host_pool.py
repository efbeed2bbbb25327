from itertools import pairwise
from pathlib import Path

import pytest
import torch

from vllm_dhisparse.runtime import host_memory
from vllm_dhisparse.runtime.host_memory import HUGE_PAGE_BYTES
from vllm_dhisparse.runtime.host_pool import HostPool, NoPinner


class RecordingPinner:
    def __init__(self, fail_at=None):
        self.fail_at, self.calls, self.ranges = fail_at, [], {}

    def pin(self, address, num_bytes):
        if len(self.calls) == self.fail_at:
            raise RuntimeError("registration failed")
        self.calls.append(("pin", address))
        self.ranges[address] = num_bytes

    def unpin(self, address):
        self.calls.append(("unpin", address))
        del self.ranges[address]

    def drain(self):
        self.calls.append(("drain", None))

    def device_address(self, address):
        return address + 1


def make_pool(**settings):
    shape = {"num_layers": 3, "num_pages": 10, "page_rows": 64, "row_size": 656}
    return HostPool(**{**shape, "dtype": torch.uint8, "num_threads": 2, **settings})


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize(("row_size", "dtype"), [(576, torch.bfloat16), (656, torch.uint8)])
def test_layers_are_separate_and_aligned(huge_pages, row_size, dtype):
    pool = make_pool(row_size=row_size, dtype=dtype, huge_pages=huge_pages)
    for index in range(3):
        assert pool.layer(index).shape == (10, 64, row_size)
        assert pool.layer(index).data_ptr() % HUGE_PAGE_BYTES == 0
        pool.layer(index).fill_(index + 1)
    for index in range(3):
        assert (pool.layer(index) == index + 1).all()
    pool.check_integrity()


def test_poisoned_memory_is_nan_everywhere():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert make_pool(dtype=dtype, poisoned=True).layer(2).isnan().all()


def test_chunks_end_on_whole_pages_and_share_no_page_of_the_system():
    pinner = RecordingPinner()
    pool = make_pool(pinner=pinner, max_chunk_bytes=200_000)
    pool.check_integrity()
    assert [chunk.num_pages for chunk in pool.chunks] == [4, 4, 2] * 3  # 64 * 656 B = 10.25 * 4 KiB
    ranges = sorted(pinner.ranges.items())
    assert all(address % 4096 == 0 and size % 4096 == 0 for address, size in ranges)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))
    for index in range(3):
        layer = pool.host_layer(index)
        expected = [chunk.address + 1 for chunk in pool.chunks if chunk.layer == index]
        assert layer.chunk_addresses.tolist() == expected
        assert layer.chunk_rows == 4 * 64
        row = torch.tensor(9 * 64 + 63)  # the last row, found as kernels find it
        start = layer.chunk_addresses[row // layer.chunk_rows] + row % layer.chunk_rows * 656
        assert start - 1 == layer.pages[9, 63].data_ptr()


def test_f41_close_unpins_in_reverse_order_once():
    pinner = RecordingPinner()
    pool = make_pool(pinner=pinner, max_chunk_bytes=200_000)
    pinned = [address for _, address in pinner.calls]
    pool.close()
    pool.close()
    unpinned = [("unpin", address) for address in reversed(pinned)]
    assert pinner.calls[len(pinned) :] == [("drain", None), *unpinned]
    assert not pinner.ranges


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_failing_pin_leaves_nothing_pinned(fail_at):
    pinner = RecordingPinner(fail_at)
    with pytest.raises(RuntimeError, match="registration failed"):
        make_pool(pinner=pinner, max_chunk_bytes=200_000)
    assert not pinner.ranges
    assert len(pinner.calls) == 2 * fail_at


def test_a_node_can_be_chosen_before_any_page_exists():
    pool = make_pool(numa_node=0)
    pool.layer(0).fill_(3)
    address = pool.layer(0).data_ptr()
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    ranges = [(int(line.split()[0], 16), line.split()[1]) for line in maps]
    assert [policy for start, policy in ranges if start <= address][-1] == "bind:0"


def test_an_unknown_node_is_a_clear_error():
    with pytest.raises(OSError, match=r"no memory node 4095 .* \['node0'"):
        make_pool(numa_node=4095)


def test_a_pool_larger_than_its_node_is_refused_before_the_system_kills_it():
    with pytest.raises(MemoryError, match="lower host_pool_gib"):
        make_pool(num_pages=2**24, numa_node=0)


def test_views_outlive_the_pool():
    pool = make_pool()
    layer = pool.layer(0)
    layer.fill_(7)
    pool.close()
    assert (layer == 7).all()


def test_too_much_memory_is_a_clear_error():
    with pytest.raises(MemoryError, match="lower host_pool_gib"):
        make_pool(num_pages=2**40)


def test_populates_without_the_advice(monkeypatch):
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 9999)
    pool = make_pool()
    assert (pool.layer(1) == 0).all()


def test_empty_pool():
    pool = make_pool(num_pages=0, pinner=NoPinner())
    assert pool.chunks == ()
    pool.check_integrity()
