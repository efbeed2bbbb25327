import pytest
import torch
from planes import IMPLEMENTATIONS, plane

from vllm_dhisparse.runtime.host_pool import HostLayer, HostPool
from vllm_dhisparse.runtime.plan import Plan
from vllm_dhisparse.runtime.tables import UNIT_ROWS


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return plane(request.param)


def random_bytes(*shape, dtype=torch.uint8):
    size = torch.empty(0, dtype=dtype).itemsize
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size)).to(torch.uint8).view(dtype)


def same_bytes(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


# F14: fp8_ds_mla, bf16, and sizes that no wide copy divides.
ROWS = [(656, torch.uint8), (576, torch.bfloat16), (20, torch.uint8), (1028, torch.uint8)]
ROWS += [(1032, torch.uint8), (7, torch.float32), (1, torch.uint8), (584, torch.float8_e4m3fn)]


@pytest.mark.parametrize(("row_size", "dtype"), ROWS)
def test_f14_retrieve_moves_exact_bytes_and_touches_no_neighbour(ops, row_size, dtype):
    host = random_bytes(4, 128, row_size, dtype=dtype)
    whole = random_bytes(9, UNIT_ROWS + 2, row_size, dtype=dtype)
    before, slab = whole.clone(), whole[:, :UNIT_ROWS]
    unit_blocks = torch.tensor([[8, 0], [0, 5], [0, 2]], dtype=torch.int32)[:, 1]  # strided
    union = torch.tensor([0, 63, 64, 130, 511], dtype=torch.int32)
    slot = torch.tensor([-1, 64 + 63, 2, 2 * 64, -1], dtype=torch.int32)
    fetch = torch.tensor([True, True, False, False, True])
    staging = random_bytes(6, row_size, dtype=dtype)
    last = staging[5].clone()
    plan = Plan(0, 1, union, slot, fetch, torch.zeros(1, 1, dtype=torch.int32))
    got = ops.retrieve(plan, slab, unit_blocks, HostLayer.of(host), staging)
    assert got.shape == (1, 5, row_size)
    flat = host.view(-1, row_size)
    expected = torch.stack([flat[0], flat[63], before[0, 2], before[2, 0], flat[511]])
    assert same_bytes(got[0], expected)
    assert same_bytes(staging[5], last)
    before[5, 63] = flat[63]  # the fresh slot
    assert same_bytes(whole, before)


@pytest.mark.parametrize(("row_size", "dtype"), ROWS)
def test_f16_f17_published_rows_are_read_back(ops, row_size, dtype):
    host = random_bytes(4, 64, row_size, dtype=dtype)
    before = host.clone()
    rows = random_bytes(4, row_size + 3, dtype=dtype)[:, :row_size]  # strided
    ops.publish(rows, torch.tensor([200, -1, 63, 64]), HostLayer.of(host))
    flat = before.view(-1, row_size)
    flat[200], flat[63], flat[64] = rows[0], rows[2], rows[3]
    assert same_bytes(host, before)


def test_f15_layers_of_one_slab_keep_to_their_own_bytes(ops):
    slab = random_bytes(3, 4, UNIT_ROWS, 10)  # [blocks, layers, rows, row_size]
    before = slab.clone()
    pool = HostPool(4, 2, 64, 10, torch.uint8, num_threads=1)
    plan = Plan(
        0,
        1,
        torch.tensor([70], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([True]),
        torch.zeros(1, 1, dtype=torch.int32),
    )
    unit_blocks, staging = torch.tensor([2], dtype=torch.int32), random_bytes(1, 10)
    for layer in range(4):
        pool.layer(layer)[1, 6] = layer
        ops.retrieve(plan, slab[:, layer], unit_blocks, pool.host_layer(layer), staging)
        before[2, layer, 1] = layer
    assert torch.equal(slab, before)


def test_f13_nothing_to_retrieve(ops):
    none = torch.zeros(0, dtype=torch.int32)
    plan = Plan(0, 0, none, none, none.bool(), torch.zeros(0, 4, dtype=torch.int32))
    slab, host = random_bytes(2, 64, 8), random_bytes(1, 64, 8)
    unit_blocks = torch.zeros(1, dtype=torch.int32)
    got = ops.retrieve(plan, slab, unit_blocks, HostLayer.of(host), random_bytes(4, 8))
    assert got.shape == (1, 0, 8)
