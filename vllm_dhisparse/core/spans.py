"""Which 64-row spans of running requests' history are on which unit, and which on none."""

from bisect import bisect_left
from collections.abc import Container, Iterable, Set
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
        self._count = 0

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
                self._count += 1

    def end(self, request_id: str) -> None:
        """Forget a request; unknown ones are fine."""
        self._count -= len(self._missing.pop(request_id, ()))

    def __len__(self) -> int:
        return self._count

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
        self._count -= len(taken)
        return taken


class PlacedSpans:
    """What units were filled with, as long as nothing has replaced it all."""

    def __init__(self) -> None:
        self._span_of_unit: dict[int, Span] = {}
        self._units_of_request: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._span_of_unit)

    def start(self, request_id: str) -> None:
        """Follow a request that starts to run."""
        self._units_of_request[request_id] = set()

    def put(self, unit: int, span: Span) -> None:
        """Note that a unit holds the rows of a span of a running request."""
        self._span_of_unit[unit] = span
        self._units_of_request[span.request_id].add(unit)

    def take(self, unit: int) -> Span | None:
        """Forget a unit, and return what it held."""
        span = self._span_of_unit.pop(unit, None)
        if span is not None:
            self._units_of_request[span.request_id].remove(unit)
        return span

    def end(self, request_id: str) -> list[int]:
        """Forget a request, and return the units that hold its spans."""
        units = sorted(self._units_of_request.pop(request_id))
        for unit in units:
            del self._span_of_unit[unit]
        return units

    def positions(self, request_id: str) -> set[int]:
        """Return the positions of a running request's spans that are on a unit."""
        return {self._span_of_unit[unit].position for unit in self._units_of_request[request_id]}

    def check_integrity(self, units: Container[int], request_ids: Set[str]) -> None:
        """Assert that only these units hold spans, and only of these requests."""
        assert self._units_of_request.keys() == request_ids
        assert all(unit in units for unit in self._span_of_unit)
        for request_id, own in self._units_of_request.items():
            assert all(self._span_of_unit[unit].request_id == request_id for unit in own)
        assert len(self._span_of_unit) == sum(map(len, self._units_of_request.values()))
