"""Numbers of units, with the blocks that each lives in and the span that it holds."""

from collections.abc import Iterable, Sequence, Set

from vllm_dhisparse.core.commands import Command, SpanRestored, UnitAdded, UnitLost, UnitState
from vllm_dhisparse.core.spans import MissingSpans, PlacedSpans, Span


class Units:
    """All live units, whatever they are for; what happens to them goes to the log.

    Args:
        num_groups: latent KV groups, the blocks of one unit.
        log: where the commands go, in the order things happen.
        missing: told which spans of running requests lose their unit.

    """

    def __init__(self, num_groups: int, log: list[Command], missing: MissingSpans) -> None:
        assert num_groups > 0
        self.num_groups = num_groups
        self.log = log
        self.missing = missing
        self.spans = PlacedSpans()
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._free_numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int], state: UnitState) -> list[int]:
        """Number new units that live in these blocks, group by group."""
        units = []
        for start in range(0, len(blocks), self.num_groups):
            unit = self._free_numbers.pop() if self._free_numbers else len(self._blocks)
            own = self._blocks[unit] = tuple(blocks[start : start + self.num_groups])
            self.log.append(UnitAdded(unit, state, own))
            units.append(unit)
        return units

    def retire(self, unit: int) -> None:
        """Let a unit go; its span is missing if its request runs."""
        del self._blocks[unit]
        self._free_numbers.append(unit)
        self.log.append(UnitLost(unit))
        span = self.spans.take(unit)
        if span is not None:
            self.missing.miss([span])

    def fill(self, unit: int, span: Span, page: int, first_row: int) -> None:
        """Have an empty unit filled with the rows of a span, from its place in host memory."""
        self.log.append(SpanRestored(unit, page, first_row))
        self.spans.put(unit, span)

    def blocks(self, unit: int) -> tuple[int, ...]:
        """Return the blocks of a unit, one for each latent group."""
        return self._blocks[unit]

    def blocks_of(self, units: Iterable[int]) -> list[int]:
        """Return the blocks of units, unit by unit."""
        return [block for unit in units for block in self._blocks[unit]]

    def check_integrity(self, request_ids: Set[str], numbers_below: int) -> None:
        """Assert what must hold between any two calls."""
        numbers = [*self._blocks, *self._free_numbers]
        assert sorted(numbers) == list(range(len(numbers)))
        assert all(number < numbers_below for number in self._blocks)
        self.spans.check_integrity(self._blocks, request_ids)


def max_units(num_blocks: int, num_groups: int) -> int:
    """Return how many units a pool can hold; their numbers are below this."""
    return num_blocks // num_groups
