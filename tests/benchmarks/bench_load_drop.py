"""What vLLM's own coordinator and adaptive residency keep of one script of requests.

Counts of blocks and rows, not times: they are the same in every run.
"""

from collections.abc import Iterator

from harness import Figure, Sizes, benchmark, figure
from load_drop import Adaptive, HiSparse, play


@benchmark("load drop")
def load_drop(sizes: Sizes) -> Iterator[Figure]:
    """A few seconds."""
    for title, scheduler in (("vLLM's HiSparse", HiSparse), ("adaptive", Adaptive)):
        outcome = play(scheduler)
        times = ("before the load drop", "right after it", "60 steps later")
        for number, when in enumerate(times):
            resident, history = outcome.resident_rows[number], outcome.history_rows[number]
            yield figure(f"{title}: rows resident {when}", resident, "rows", history)
            yield figure(f"{title}: rows of cache {when}", outcome.cache_rows[number], "rows")
        yield figure(f"{title}: steps a request waits at full load", outcome.waited_steps, "steps")
        yield figure(f"{title}: preemptions", outcome.preemptions, "times")
