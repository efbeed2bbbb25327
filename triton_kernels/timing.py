"""A clock that a graph reads each time it is replayed."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.language.extra.hip import memrealtime


@triton.jit
def _nanoseconds(CLOCK: tl.constexpr):
    """Return the time of the device; the interpreter has none."""
    if CLOCK == "nvidia":
        now = globaltimer()
    elif CLOCK == "amd":
        now = memrealtime() * 10  # its clock has 100 MHz
    else:
        now = tl.cast(0, tl.int64)
    return now


@triton.jit
def start_clock(
    started,  # out [1] int64
    CLOCK: tl.constexpr,
):
    """Note the time."""
    tl.store(started, _nanoseconds(CLOCK))


@triton.jit
def stop_clock(
    started,  # [1] int64
    generates,  # [1] uint8: whether the step generates
    totals,  # in, out [phases, 2] int64: nanoseconds, and how often
    CLOCK: tl.constexpr,
):
    """Add the time since then to the phase of the step."""
    cell = totals + tl.where(tl.load(generates) != 0, 0, 2)
    tl.store(cell, tl.load(cell) + _nanoseconds(CLOCK) - tl.load(started))
    tl.store(cell + 1, tl.load(cell + 1) + 1)
