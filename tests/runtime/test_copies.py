from types import SimpleNamespace

import pytest
import torch
from planes import IMPLEMENTATIONS, plane
from spans import slab_and_span

from vllm_dhisparse.runtime.host_pool import HostLayer, HostPool
from vllm_dhisparse.runtime.plan import Plan
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.span import span, staging_bytes
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


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "cpu"])
def device_ops(request):
    return plane(request.param)


def small_plan():
    union = torch.tensor([0, 63, 64, 130, 511], dtype=torch.int32)
    slot = torch.tensor([-1, 64 + 63, 2, 2 * 64, -1], dtype=torch.int32)
    fetch = torch.tensor([True, True, False, False, True])
    return Plan(0, 1, union, slot, fetch, torch.zeros(1, 1, dtype=torch.int32))


def test_fp8_rows_are_decoded_to_staging_and_kept_as_they_are_in_slots(device_ops):
    """Every e4m3 value, NaN and subnormals among them; scales of all sizes, and for ties."""
    host = random_bytes(4, 128, 656)
    scales = torch.randn(4, 128, 4) * 10.0 ** torch.randint(-6, 6, (4, 128, 4))
    scales[..., ::2] = torch.randint(32, 64, (4, 128, 2)) / 32
    host[..., 512:528] = scales.view(torch.uint8)
    host[..., 528:] = torch.randn(4, 128, 64).bfloat16().view(torch.uint8)
    whole = host.view(-1, 656)[torch.randint(0, 512, (9 * 66,))].view(9, 66, 656).clone()
    before, slab = whole.clone(), whole[:, :UNIT_ROWS]
    unit_blocks = torch.tensor([0, 5, 2], dtype=torch.int32)
    staging = torch.full((6, 576), float("nan"), dtype=torch.bfloat16)
    got = device_ops.retrieve(small_plan(), slab, unit_blocks, HostLayer.of(host), staging)
    flat = host.view(-1, 656)
    rows = torch.stack([flat[0], flat[63], before[0, 2], before[2, 0], flat[511]])
    values = rows[:, :512].view(torch.float8_e4m3fn).float().view(5, 4, 128)
    scale = rows[:, 512:528].clone().view(torch.float32)
    expected = (values * scale[..., None]).flatten(1).bfloat16()
    assert torch.equal(got[0, :, :512].isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(got[0, :, :512][numbers], expected[numbers])
    assert same_bytes(got[0, :, 512:], rows[:, 528:].clone().view(torch.bfloat16))
    assert staging[5].isnan().all()
    before[5, 63] = flat[63]
    assert torch.equal(whole, before)


@pytest.mark.parametrize("staging_first", [False, True])
@pytest.mark.parametrize(("row_size", "gap"), [(576, 2 * 576), (656, 256), (16, 0)])
def test_in_place_only_misses_move(device_ops, row_size, gap, staging_first):
    """Blocks that are whole rows apart, and others; one index reaches slab and staging."""
    host, memory = HostLayer.of(random_bytes(4, 128, row_size)), random_bytes(1 << 20)
    step = UNIT_ROWS * row_size + gap
    num_bytes = staging_bytes(70, row_size, step)
    low, high = memory[: 9 * step], memory[-num_bytes:]
    if staging_first:
        low, high = memory[-9 * step :], memory[:num_bytes]
    slab = low.as_strided((9, UNIT_ROWS, row_size), (step, row_size, 1), low.storage_offset())
    found = span(slab, high, 70)
    unit_blocks, before = torch.tensor([0, 5, 2], dtype=torch.int32), memory.clone()
    plan = small_plan()._replace(remap=torch.tensor([[4, -1, 0], [1, 2, 3]], dtype=torch.int32))
    index = device_ops.retrieve_in_place(plan, found, slab, unit_blocks, host, Scratch())
    rows = found.rows.view(torch.uint8)
    page_rows = rows.shape[1]
    got = torch.stack(
        [rows[i // page_rows, i % page_rows] for i in index.flatten()[[0, *range(2, 6)]]]
    )
    flat = host.pages.view(-1, row_size)
    cached = slab[[0, 2], [2, 0]]
    assert torch.equal(got, torch.stack([flat[511], flat[0], flat[63], *cached]))
    assert index[0, 1] == -1
    changed = (memory != before).sum()
    assert 0 < changed <= 3 * row_size, "a hit was moved"
    assert torch.equal(slab[5, 63], flat[63]), "a fresh slot was not filled"


@pytest.mark.parametrize("gap", [0, 256])
def test_staged_rows_fill_page_after_page(device_ops, gap):
    """Pages of staging lie as far apart as blocks do, or touch."""
    host, block_bytes = HostLayer.of(random_bytes(4, 128, 656)), UNIT_ROWS * 656 + gap
    slab, found = slab_and_span(2, 656, torch.uint8, block_bytes, 150)
    rows = torch.randperm(512)[:150].sort().values.int()
    everyone = torch.arange(150, dtype=torch.int32)[None]
    plan = Plan(0, 1, rows, torch.full_like(rows, -1), rows >= 0, everyone)
    unit_blocks = torch.zeros(1, dtype=torch.int32)
    index = device_ops.retrieve_in_place(plan, found, slab, unit_blocks, host, Scratch())[0].long()
    page_rows = found.rows.shape[1]
    got = found.rows[index // page_rows, index % page_rows]
    assert torch.equal(got, host.pages.view(-1, 656)[rows.long()])
    assert not slab.any()


def test_a_span_that_no_index_reaches():
    slab = torch.empty(3, UNIT_ROWS, 1, dtype=torch.uint8)
    memory = torch.empty(staging_bytes(1, 1, UNIT_ROWS), dtype=torch.uint8)
    far = slab.data_ptr() + (1 << 31)
    with pytest.raises(ValueError, match="further than an index reaches"):
        span(slab, SimpleNamespace(data_ptr=lambda: far, numel=memory.numel), 1)


def test_chunks_of_a_layer_are_read_through_their_addresses(ops):
    """Two chunks that lie apart, in the wrong order."""
    memory = random_bytes(3, 128, 20)
    layer = HostLayer(
        torch.cat([memory[2:], memory[:1]]),
        torch.tensor([memory[2].data_ptr(), memory[0].data_ptr()]),
        128,
    )
    union = torch.tensor([5, 127, 128, 255], dtype=torch.int32)
    plan = Plan(0, 1, union, union * 0 - 1, union >= 0, torch.zeros(1, 1, dtype=torch.int32))
    slab, unit_blocks = random_bytes(2, 64, 20), torch.zeros(1, dtype=torch.int32)
    got = ops.retrieve(plan, slab, unit_blocks, layer, random_bytes(4, 20))
    assert torch.equal(got[0], layer.pages.view(-1, 20)[union.long()])


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
