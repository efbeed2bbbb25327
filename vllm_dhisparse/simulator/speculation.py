"""Draft lengths, acceptance, and what rejected drafts cost."""

from typing import NamedTuple

import numpy as np

from vllm_dhisparse.core.drafts import REJECTED_ROWS_SHARE


class Speculation(NamedTuple):
    """A drafter as the target sees it.

    ``survival``: chance that the first 1, 2, .. drafts of a step are all accepted, so not
    increasing; ``ring_rows``: draft KV rows of a request (window - 1 + queries, and a block
    more, which is at least what a ring rounds up to); ``row_bytes``: draft KV of one row in
    all draft layers; ``weights_gb``: of the drafter; ``rejected_price``: rows that a rejected
    query makes the step fetch, as a share of what a step without drafts fetches; ``source``:
    of the numbers.
    """

    name: str
    survival: tuple[float, ...]
    ring_rows: int
    row_bytes: int
    weights_gb: float
    rejected_price: float
    source: str

    @property
    def queries(self) -> int:
        """Queries of a verify step: the drafts and the token before them."""
        return 1 + len(self.survival)

    @property
    def accepted(self) -> float:
        """Tokens of a step on average, the bonus token included."""
        return 1 + sum(self.survival)

    def draw(self, seed: int, request: int, generated: int, drafts: int) -> int:
        """Tokens that a step adds after ``generated``, whatever the policy and the time."""
        if not drafts:
            return 1
        chance = np.random.default_rng([seed, request, generated]).random()
        return 1 + sum(chance < survives for survives in self.survival[:drafts])


def geometric(name: str, drafts: int, accepted: float) -> tuple[float, ...]:
    """Return survival with one chance for every draft, so that a step adds ``accepted`` tokens.

    Raises:
        ValueError: no chance gives that many.

    """
    if not 1 <= accepted < 1 + drafts:
        raise ValueError(f"{name}: {drafts} drafts cannot give {accepted} tokens a step")
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        if 1 + sum(chance**place for place in range(1, drafts + 1)) < accepted:
            low = chance
        else:
            high = chance
    return tuple(round(low**place, 6) for place in range(1, drafts + 1))


NONE = Speculation("none", (), 0, 0, 0.0, 0.0, "no drafts")
_PRICE_SOURCE = "rejected drafts: measured on recorded traces of a small model, 0.44-0.74"
SPECULATIONS = {
    "none": NONE,
    "dflash2": Speculation(
        "dflash2",
        geometric("dflash2", 7, 2.25),
        2048 - 1 + 8 + 64,
        6 * 2 * 8 * 128 * 2,
        4.9,
        REJECTED_ROWS_SHARE,
        "published: 6 windowed layers, 7 drafts, 2.20 tokens a step on prose and 2.84 on code at"
        f" 32K; assumed: 2.25 at 100K, window 2,048, 8 heads of 128; {_PRICE_SOURCE}",
    ),
    "dspark": Speculation(
        "dspark",
        geometric("dspark", 5, 2.82),
        128 + 6 + 64,
        1752,
        2.0,
        REJECTED_ROWS_SHARE,
        "published: 3 layers, window 128, 584 B a row, 5 drafts, 2.82 tokens a step;"
        f" assumed: 2 GB of weights; {_PRICE_SOURCE}",
    ),
}


def speculation_named(text: str) -> Speculation:
    """Return a drafter: a known name, or ``fixed:ACCEPTED,DRAFTS``.

    Raises:
        ValueError: the text is neither.

    """
    if text in SPECULATIONS:
        return SPECULATIONS[text]
    kind, _, numbers = text.partition(":")
    accepted, _, drafts = numbers.partition(",")
    if kind != "fixed" or not drafts.isdigit():
        known = ", ".join(SPECULATIONS)
        raise ValueError(f"unknown speculation {text!r}; known: {known}, fixed:ACCEPTED,DRAFTS")
    like = SPECULATIONS["dflash2"]
    survival = geometric(text, int(drafts), float(accepted))
    return like._replace(name=text, survival=survival, source="given on the command line")
