"""A clock that a graph reads each time it is replayed."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.language.extra.hip import memrealtime
from triton.language.target_info import is_cuda


@triton.jit
def _nanoseconds(INTERPRETED: tl.constexpr):
    """Return the time of the device; the interpreter has none."""
    if INTERPRETED:
        now = tl.cast(0, tl.int64)
    elif is_cuda():
        now = globaltimer()
    else:
        now = memrealtime() * 10  # its clock has 100 MHz
    return now


@triton.jit
def start_clock(
    started,  # out [1] int64
    INTERPRETED: tl.constexpr,
):
    """Note the time."""
    tl.store(started, _nanoseconds(INTERPRETED))


@triton.jit
def stop_clock(
    started,  # [1] int64
    generates,  # [1] uint8: whether the step generates
    totals,  # in, out [phases, 2] int64: nanoseconds, and how often
    INTERPRETED: tl.constexpr,
):
    """Add the time since then to the phase of the step."""
    cell = totals + tl.where(tl.load(generates) != 0, 0, 2)
    tl.store(cell, tl.load(cell) + _nanoseconds(INTERPRETED) - tl.load(started))
    tl.store(cell + 1, tl.load(cell + 1) + 1)
