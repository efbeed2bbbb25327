"""How a step's rows are found: what the engine asks, whatever the fidelity."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.commands import Command, UnitState
from vllm_dhisparse.simulator.loads import Arrival
from vllm_dhisparse.simulator.streams import Place

Pages: TypeAlias = NDArray[np.int64]
"""[pages] - a request's host pages in the order of its tokens."""


class Asking(NamedTuple):
    """A request in a step.

    ``number``: of the request; ``place``: of its stream; ``tokens``: before the step;
    ``generated``: of those, by this request; ``queries``, ``accepted``: of the step;
    ``page_table``: its host pages.
    """

    number: int
    place: Place
    tokens: int
    generated: int
    queries: int
    accepted: int
    page_table: Pages


class Found(NamedTuple):
    """Rows of a step, mean of the index groups.

    ``selected``: float64 [4], by ``UnitState`` of where they were found, DEAD = host;
    ``fetched``: distinct rows that crossed the link; ``most_fetched``: in the index group
    that fetched most.
    """

    selected: NDArray[np.float64]
    fetched: float
    most_fetched: int

    @classmethod
    def nothing(cls) -> "Found":
        """A step without rows."""
        return cls(np.zeros(len(UnitState)), 0.0, 0)


class Fidelity(Protocol):
    """The row caches of a GPU, exactly or as a curve."""

    def place(self, arrival: Arrival, drafts: int) -> Place:
        """Return what a new request is going to select."""
        ...

    def apply(self, commands: Sequence[Command]) -> int:
        """Heed what the scheduler did; return rows restored, mean of the index groups."""
        ...

    def write(self, page_table: Pages, first: int, end: int, tail_blocks: Sequence[int]) -> None:
        """The tokens ``first .. end`` of a request get their rows.

        Args:
            page_table: of the request.
            first, end: positions; end is excluded.
            tail_blocks: block of each tail unit from that of ``first`` on.

        """
        ...

    def resolve(self, requests: Sequence[Asking]) -> Found:
        """Serve the selections of all requests in a step."""
        ...
