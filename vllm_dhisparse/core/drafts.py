"""How long drafts may be, and what their verification costs, when history is not all resident."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REJECTED_ROWS_SHARE = 0.55
"""Rows that the query of a rejected draft fetches, as a share of what an accepted one does.
Measured on recorded selections of a small language model with 3 to 7 wrong drafts in a step
and up to 8k rows on the device, where it lies between .44 and .74."""
_STEP_WEIGHT = 0.98
"""What a step counts beside the one after it: about the last 50 make an estimate."""


def draft_limit(
    num_drafts: int,
    free_blocks: int,
    waiting_blocks: int,
    growth_blocks: Callable[[int], int],
) -> int:
    """Return the draft tokens of a request in the next step: shorter before one is refused.

    It is the longest draft with which the running requests can grow beside what the next
    waiting one requires. Where no draft is short enough for that, the waiting request stays
    where it is, and the length is the longest that lets the others grow without preemption.

    Args:
        num_drafts: draft tokens that vLLM would ask for.
        free_blocks: of the pool, optional units included.
        waiting_blocks: what the next waiting request requires; 0 = none waits for blocks.
        growth_blocks: blocks that the running requests may take in a step with so many
            draft tokens each; does not fall with the length.

    """
    for wanted_blocks in (waiting_blocks, 0):
        room = free_blocks - wanted_blocks
        num_fitting = bisect_right(range(num_drafts + 1), room, key=growth_blocks)
        if num_fitting:
            return num_fitting - 1
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPrice:
    """Time that the misses of a verified token take on the host link.

    Attributes:
        missed_rows: fetched rows of a query without drafts, mean over index groups.
        bytes_per_row: of one row in all latent layers.
        link_bytes_per_ms: of the host link, as measured.
        acceptance: share of drafts that are accepted, 0 to 1.

    Raises:
        ValueError: a value is out of its range; the message names it.

    """

    missed_rows: float
    bytes_per_row: int
    link_bytes_per_ms: float
    acceptance: float

    def __post_init__(self) -> None:
        if self.missed_rows < 0 or self.bytes_per_row < 0:
            raise ValueError(f"rows and bytes must be 0 or more; got {self}")
        if not self.link_bytes_per_ms > 0:
            raise ValueError(f"link_bytes_per_ms must be above 0; got {self.link_bytes_per_ms}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance must be a share from 0 to 1; got {self.acceptance}")

    @property
    def ms_per_draft(self) -> float:
        """Expected fetch time of one more draft: what an accepted one fetches would be
        fetched without speculation too, one step later; a rejected one fetches for nothing."""
        share = self.acceptance + REJECTED_ROWS_SHARE * (1 - self.acceptance)
        return share * self.missed_rows * self.bytes_per_row / self.link_bytes_per_ms


class FetchEstimate:
    """What the queries of verification fetch, by the steps so far; older ones count less."""

    def __init__(self) -> None:
        self._requests = self._drafts = self._accepted = self._fetched_rows = 0.0

    def observe(self, requests: int, drafts: int, accepted: int, fetched_rows: int) -> None:
        """Add a step.

        Args:
            requests: that verified drafts.
            drafts: verified, of all requests.
            accepted: of them.
            fetched_rows: of one index group.

        """
        self._requests = _STEP_WEIGHT * self._requests + requests
        self._drafts = _STEP_WEIGHT * self._drafts + drafts
        self._accepted = _STEP_WEIGHT * self._accepted + accepted
        self._fetched_rows = _STEP_WEIGHT * self._fetched_rows + fetched_rows

    def price(self, bytes_per_row: int, link_bytes_per_ms: float) -> FetchPrice | None:
        """Return the price of a draft, None before a step verified any.

        A request's own token fetches what it would without drafts, an accepted draft the same,
        a rejected one `REJECTED_ROWS_SHARE` of it; their sum is what was fetched.
        """
        if not self._drafts:
            return None
        acceptance = min(self._accepted / self._drafts, 1.0)
        share = acceptance + REJECTED_ROWS_SHARE * (1 - acceptance)
        return FetchPrice(
            missed_rows=self._fetched_rows / (self._requests + self._drafts * share),
            bytes_per_row=bytes_per_row,
            link_bytes_per_ms=link_bytes_per_ms,
            acceptance=acceptance,
        )


def with_fetch_time(
    verify_ms: NDArray[np.float64], fetch_ms_per_draft: float
) -> NDArray[np.float64]:
    """Return the cost table of adaptive verification with expected fetch time in it.

    vLLM profiles the target once at start, on rows that are all resident, and then verifies
    the number of drafts with the most expected tokens per time. Its table has steps, since
    a step is padded to the next captured size; padding fetches nothing, so fetch time has none.

    Args:
        verify_ms: [tokens + 1] float64, milliseconds of a step by its tokens.
        fetch_ms_per_draft: see `FetchPrice`. Every token of a step is priced as a draft, since
            the table does not tell them apart; for the other tokens this adds the same at
            every number of drafts.

    """
    return verify_ms + np.arange(len(verify_ms)) * fetch_ms_per_draft
