"""How many cached rows are in use, from the ages that hits find.

An estimate for people and metrics; nothing is decided by it. Growth follows the rows that
are missed, which tests/core/test_lazy_growth.py shows to miss no more than a cache that holds
all history, so a limit on growth could only add misses.
"""

from typing import NamedTuple

RARE_SHARE = 0.01
"""Of all hits: what a row must promise to count as in use."""


class Usage(NamedTuple):
    """What a worker saw of one index group in one step.

    ``hit_ages``, ``cached_ages``: rows by age, see ``core.clock``, before the step: those that
    the step found in the row cache, and all rows in it. ``fetched_rows``: rows that it missed.
    ``union_rows``: distinct rows that each request read, prefill apart.
    """

    hit_ages: tuple[int, ...]
    cached_ages: tuple[int, ...]
    fetched_rows: int
    union_rows: tuple[int, ...]


def working_set_rows(usage: Usage) -> int:
    """Return the rows that get all but a hundredth of the hits, and those just fetched.

    The hand takes an age away each time it passes, so rows of low age have gone unused for
    as many turns. While nothing has to be replaced no age falls, and all rows count that
    were used since they came.
    """
    spare_hits = int(RARE_SHARE * sum(usage.hit_ages))
    rows = sum(usage.cached_ages)
    for hits, cached in zip(usage.hit_ages, usage.cached_ages, strict=True):
        if hits > spare_hits:
            break
        spare_hits -= hits
        rows -= cached
    return rows + usage.fetched_rows
