"""Which 64-row spans of running requests' history are on no unit, newest first."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Rows ``position * 64`` and the 63 after it of a request."""

    request_id: str
    position: int


class MissingSpans:
    """Spans that could be restored: their rows are in host memory and nowhere else whole.

    A span comes in when the unit that held it is lost, or when a prefix hit starts
    without units. Only spans of processed tokens may come in: their host rows are
    written by the time a later step's commands are applied.
    """

    def __init__(self) -> None:
        self._missing: dict[str, list[int]] = {}
        """Positions, ascending: the newest is taken without a look at the others."""

    def start(self, request_id: str) -> None:
        """Follow a request that starts to run."""
        self._missing.setdefault(request_id, [])

    def miss(self, spans: Iterable[Span]) -> None:
        """Note spans without a unit; those of requests that do not run are ignored."""
        for request_id, position in spans:
            positions = self._missing.get(request_id)
            if positions is None:
                continue
            place = bisect_left(positions, position)
            if place == len(positions) or positions[place] != position:
                positions.insert(place, position)

    def end(self, request_id: str) -> None:
        """Forget a request; unknown ones are fine."""
        self._missing.pop(request_id, None)

    def __len__(self) -> int:
        return sum(map(len, self._missing.values()))

    def take(self, count: int) -> list[Span]:
        """Remove and return up to ``count`` spans: of each request in turn its newest."""
        taken: list[Span] = []
        while len(taken) < count:
            before = len(taken)
            for request_id, positions in self._missing.items():
                if positions and len(taken) < count:
                    taken.append(Span(request_id, positions.pop()))
            if len(taken) == before:
                break
        return taken
