"""The residency controller in its loop: sees a step, decides, and has the ledger do it."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_dhisparse.core.controller import History, Pressure, ResidencyController, Targets
from vllm_dhisparse.core.ledger import Ledger
from vllm_dhisparse.core.spans import MissingSpans, Span


class HostPlace(NamedTuple):
    """Where the rows of a span lie in host memory: a page, and the first of its rows."""

    page: int
    first_row: int


class Adaptation(NamedTuple):
    """What one step did with spare memory.

    ``targets``: of the controller; ``pressure_ratio``: share of the pool that is required,
    0 to 1; units adopted empty, adopted and restored, taken back by the pool, given up for the
    reserve.
    """

    targets: Targets
    pressure_ratio: float
    adopted_units: int
    restored_units: int
    reclaimed_units: int
    given_up_units: int


class AdaptiveResidency:
    """Controller and ledger of one engine, with what the controller has to remember.

    Args:
        controller: decides.
        ledger: of the engine, residency ``adaptive``.
        num_blocks: of its pool.
        missing: spans of running requests that could be restored.
        place_of: where a span lies in host memory.

    """

    def __init__(
        self,
        controller: ResidencyController,
        ledger: Ledger,
        num_blocks: int,
        missing: MissingSpans,
        place_of: Callable[[Span], HostPlace],
    ) -> None:
        self._controller = controller
        self._ledger = ledger
        self._num_blocks = num_blocks
        self._missing = missing
        self._place_of = place_of
        self._history = History()
        ledger.optional.find_plain()  # all of a new pool: before there is a step to wait for it

    def adapt(
        self,
        waiting_blocks: int,
        growth_blocks: int,
        fetched_rows: int,
        working_set_rows: int = 0,
    ) -> Adaptation:
        """Use spare memory, once a step when all its allocations are complete.

        Args:
            waiting_blocks: see `Pressure`.
            growth_blocks: see `Pressure`.
            fetched_rows: see `Pressure`.
            working_set_rows: see `core.working_set`.

        """
        ledger, optional = self._ledger, self._ledger.optional
        head_reserve_blocks = self._controller.head_reserve_blocks
        levels = ledger.levels()
        reclaimed = optional.take_reclaimed()
        other_blocks = optional.find_plain() + levels.optional_units * ledger.num_groups
        seen = Pressure(
            total_blocks=self._num_blocks,
            free_blocks=levels.free_blocks,
            blocks_per_unit=ledger.num_groups,
            tail_units=levels.tail_units,
            required_units=levels.required_units,
            optional_units=levels.optional_units,
            lost_units=reclaimed,
            waiting_blocks=waiting_blocks,
            growth_blocks=growth_blocks,
            fetched_rows=fetched_rows,
            restorable_units=len(self._missing),
            cached_blocks=levels.free_blocks - other_blocks,
            working_set_rows=working_set_rows,
            ended_units=optional.num_ended,
        )
        targets, self._history = self._controller.reconcile(seen, self._history)
        given_up = optional.refill_reserve(head_reserve_blocks)
        units: list[int] = []
        if targets.adopt_units:
            units = optional.adopt(targets.adopt_units, head_reserve_blocks)
            units += optional.recycle(min(targets.adopt_units - len(units), targets.restore_units))
        restored = self.restore(units[: targets.restore_units])
        used_blocks = self._num_blocks - levels.free_blocks + waiting_blocks
        return Adaptation(
            targets,
            min(used_blocks / self._num_blocks, 1.0),
            len(units) - restored,
            restored,
            reclaimed,
            given_up,
        )

    def restore(self, units: list[int]) -> int:
        """Fill empty units with the newest spans that are on no unit; return how many."""
        spans = self._missing.take(len(units))
        for unit, span in zip(units, spans, strict=False):
            self._ledger.fill(unit, span, *self._place_of(span))
        return len(spans)
