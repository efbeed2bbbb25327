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
def places_of(address, place, ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return pointers to elements of rows, which the compiler may then take 16 bytes at a time.

    It derives nothing from addresses that are numbers: without the hints it copies by the word.
    """
    pointer = address.to(tl.pointer_type(ELEMENT))[:, None] + place[None, :]
    if ALIGNMENT == 16:
        elements: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
        pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, elements))
    return pointer


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
    for first in tl.static_range(0, WIDTH, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place[None, :] < WIDTH
        origin = places_of(source, place, ELEMENT, ALIGNMENT)
        value = tl.load(origin, mask=mask[:, None] & inside)
        first_place = places_of(target, place, ELEMENT, ALIGNMENT)
        tl.store(first_place, value, mask=mask[:, None] & inside)
        second_place = places_of(second, place, ELEMENT, ALIGNMENT)
        tl.store(second_place, value, mask=both[:, None] & inside)
