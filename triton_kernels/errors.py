"""Bits of the error word: what a kernel found impossible and left out, in place of a trap."""

import triton
import triton.language as tl

NO_HOST_PAGE_SELECTED = tl.constexpr(1 << 0)
NO_HOST_PAGE_WRITTEN = tl.constexpr(1 << 1)
PADDING_DIFFERS = tl.constexpr(1 << 2)
OUTSIDE_UNITS = tl.constexpr(1 << 3)
OUTSIDE_TAIL = tl.constexpr(1 << 4)
OTHER_GROUP = tl.constexpr(1 << 5)
PAGE_BOUND_TWICE = tl.constexpr(1 << 6)
PAGE_NOT_OWNED = tl.constexpr(1 << 7)
UNIT_LIVES = tl.constexpr(1 << 8)
BLOCK_IN_UNIT = tl.constexpr(1 << 9)
UNIT_IS_DEAD = tl.constexpr(1 << 10)
SPAN_OUTSIDE_OPTIONAL = tl.constexpr(1 << 11)
SPAN_OF_UNBOUND_PAGE = tl.constexpr(1 << 12)
SPAN_OVER_ROWS = tl.constexpr(1 << 13)
UNION_OVERFLOWS = tl.constexpr(1 << 14)


@triton.jit
def report(errors, code: tl.constexpr, wrong):
    """Set a bit of the error word if anything in a block is wrong."""
    nowhere = tl.zeros(wrong.shape, tl.int32)
    tl.atomic_or(errors + nowhere, nowhere + code, mask=wrong, sem="relaxed")


@triton.jit
def report_if(errors, code: tl.constexpr, wrong):
    """Set a bit of the error word if a scalar is true."""
    if wrong:
        tl.atomic_or(errors, code, sem="relaxed")
