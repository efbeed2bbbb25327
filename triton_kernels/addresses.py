"""Where rows lie: host rows through the table of chunk addresses, slots through their units.

All addresses are int64 in bytes, so that one load can read host and device rows alike.
"""

import triton
import triton.language as tl


@triton.jit
def host_addresses(chunk_addresses, row, mask, chunk_rows, row_bytes):
    """Return where host rows are; see ``HostLayer``."""
    chunk = row // chunk_rows
    start = tl.load(chunk_addresses + chunk, mask=mask, other=0)
    return start + (row - chunk * chunk_rows).to(tl.int64) * row_bytes


@triton.jit
def slot_addresses(
    slab, unit_blocks, slot, mask, blocks_stride, block_bytes, row_stride, UNIT_ROWS
):
    """Return where slots are in a layer: ``slab`` is its address."""
    block = tl.load(unit_blocks + slot // UNIT_ROWS * blocks_stride, mask=mask, other=0)
    return slab + block.to(tl.int64) * block_bytes + (slot % UNIT_ROWS).to(tl.int64) * row_stride


@triton.jit
def copy_rows(
    source,  # [rows] int64 address
    target,
    second,  # a second target
    mask,
    both,  # mask of the second target
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows of WIDTH elements; addresses are multiples of ALIGNMENT."""
    pointer = tl.pointer_type(ELEMENT)
    source = tl.multiple_of(source, ALIGNMENT).to(pointer)
    target = tl.multiple_of(target, ALIGNMENT).to(pointer)
    second = tl.multiple_of(second, ALIGNMENT).to(pointer)
    for first in tl.static_range(0, WIDTH, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place[None, :] < WIDTH
        value = tl.load(source[:, None] + place[None, :], mask=mask[:, None] & inside)
        tl.store(target[:, None] + place[None, :], value, mask=mask[:, None] & inside)
        tl.store(second[:, None] + place[None, :], value, mask=both[:, None] & inside)
