"""Rows of the format ``fp8_ds_mla`` into bfloat16.

A row of 656 bytes is 512 e4m3 values, a float32 scale for each 128 of them, and 64 bfloat16
values of the rope part. Integer operations decode it, because no operation on e4m3
exists below sm_89, and round to the nearest even, as torch does.
"""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.addresses import host_addresses, places_of, slot_addresses


@triton.jit
def _from_e4m3(byte):
    byte = byte.to(tl.uint32)
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120: the biases differ
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _to_bfloat16_bits(value):
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.uint16)


@triton.jit(do_not_specialize=["capacity"])
def retrieve_decoded(
    rows,  # [capacity] int32: host rows, -1 = none
    slot,  # [capacity] int32
    fetch,  # [capacity] uint8
    unit_blocks,  # [num_units] int32, strided
    chunk_addresses,  # [chunks] int64
    slab,  # int64 address
    staging,  # out [capacity, 576] uint16: bits of bfloat16
    capacity,
    chunk_rows,
    blocks_stride,
    block_bytes,
    slab_row_bytes,
    UNIT_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """``retrieve_rows`` where staging holds decoded rows; slots hold them as they are."""
    rank = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(rows + rank, mask=rank < capacity, other=-1)
    real = row >= 0
    place = tl.load(slot + rank, mask=real, other=-1)
    lost = tl.load(fetch + rank, mask=real, other=0) != 0
    home = host_addresses(chunk_addresses, row, lost, chunk_rows, 656)
    cached = slot_addresses(
        slab, unit_blocks, place, place >= 0, blocks_stride, block_bytes, slab_row_bytes, UNIT_ROWS
    )
    source = tl.where(lost, home, cached)
    fresh = (lost & (place >= 0))[:, None]
    mask = real[:, None]
    staged = staging + rank.to(tl.int64)[:, None] * 576
    value = tl.arange(0, 128)
    for part in tl.static_range(4):
        byte = tl.load(places_of(source, part * 128 + value, tl.uint8, 16), mask=mask, other=0)
        tl.store(places_of(cached, part * 128 + value, tl.uint8, 16), byte, mask=fresh)
        scale = tl.load((source + 512 + 4 * part).to(tl.pointer_type(tl.float32)), mask=real)
        decoded = _to_bfloat16_bits(_from_e4m3(byte) * scale[:, None])
        tl.store(staged + part * 128 + value[None, :], decoded, mask=mask)
    word = tl.arange(0, 4)
    scales = tl.load(places_of(source, 128 + word, tl.int32, 16), mask=mask, other=0)
    tl.store(places_of(cached, 128 + word, tl.int32, 16), scales, mask=fresh)
    word = tl.arange(0, 32)
    rope = tl.load(places_of(source, 132 + word, tl.int32, 16), mask=mask, other=0)
    tl.store(places_of(cached, 132 + word, tl.int32, 16), rope, mask=fresh)
    target = (staged + 512).to(tl.pointer_type(tl.int32)) + word[None, :]
    tl.store(target, rope, mask=mask)
