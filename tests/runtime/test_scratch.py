import pytest
import torch

from vllm_dhisparse.runtime.scratch import Scratch


def test_buffers_grow_and_are_reused():
    scratch = Scratch()
    first = scratch.take("rows", 3, 5, dtype=torch.int32)
    assert first.shape == (3, 5)
    assert scratch.take("rows", 16, dtype=torch.int32).data_ptr() == first.data_ptr()
    assert scratch.take("rows", 17, dtype=torch.int32).numel() == 17
    scratch.take("other", 0, dtype=torch.bool)
    size = scratch.num_bytes
    scratch.take("rows", 30, dtype=torch.int32)
    assert scratch.num_bytes == size


def test_a_name_has_one_dtype():
    scratch = Scratch()
    scratch.take("rows", 3, dtype=torch.int32)
    with pytest.raises(AssertionError, match="rows"):
        scratch.take("rows", 3, dtype=torch.int64)


def test_outgrown_buffers_of_a_device_stay():
    on_host, on_device = Scratch(), Scratch("meta")
    for scratch in (on_host, on_device):
        scratch.take("rows", 16, dtype=torch.int32)
        scratch.take("rows", 17, dtype=torch.int32)
    assert on_host.num_bytes == 4 * 32
    assert on_device.num_bytes == 4 * (16 + 32)
