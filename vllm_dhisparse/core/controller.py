"""The residency controller: how many free blocks become row cache in this step.

It decides from plain numbers seen at the end of a scheduler step and keeps no state:
what it has to remember is handed back to it. It is level-triggered, so a missed or a
repeated call does no harm.

Memory goes back without it. An optional unit is free to vLLM, which takes the blocks in
the step that needs them; ``OptionalUnits.refill_reserve``, called each step with the same
``head_reserve_blocks``, gives up the oldest units so that this costs no cached prefix.
What is decided here is only when, and how fast, the row cache grows again.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

from vllm_dhisparse.core.commands import UNIT_ROWS

ResidencyState: TypeAlias = Literal["grow", "hold", "shrink", "reclaim"]
"""``grow``: units are adopted. ``hold``: nothing changes. ``shrink``: optional units stand
where the next steps or the next request will allocate, so the oldest are about to go.
``reclaim``: the pool has taken optional units back."""


class Pressure(NamedTuple):
    """What is seen at the end of a scheduler step.

    ``total_blocks``, ``free_blocks``: of the pool; blocks of optional units are free.
    ``blocks_per_unit``: latent KV groups.
    ``tail_units``, ``required_units``, ``optional_units``: units by state.
    ``lost_units``: optional units that the pool took back since the last ``reconcile``;
    units given up by the ledger are not among them.
    ``waiting_blocks``: what the next waiting request requires; 0 = none waits, or what it
    waits for is not blocks.
    ``growth_blocks``: what the running requests may allocate in a step.
    ``fetched_rows``: rows fetched in the last reported step, in the index group that
    fetched most, since a unit has 64 slots in each.
    ``restorable_units``: 64-row spans of running requests' history that are on no unit.
    ``cached_blocks``: free blocks that are neither plain nor of optional units: taking them
    costs prefix hits, so they may serve growth that has to be, and are never adopted.
    ``working_set_rows``: see ``core.working_set``; seen beside the rest and used by no rule,
    since growth by misses ends by itself where nothing more is used.
    ``ended_units``: optional units that hold what ended requests left.
    """

    total_blocks: int
    free_blocks: int
    blocks_per_unit: int
    tail_units: int
    required_units: int
    optional_units: int
    lost_units: int
    waiting_blocks: int
    growth_blocks: int
    fetched_rows: int
    restorable_units: int
    cached_blocks: int = 0
    working_set_rows: int = 0
    ended_units: int = 0


class Targets(NamedTuple):
    """What to do in this step.

    ``adopt_units``: how many units to make of plain free blocks. ``restore_units``: how many of
    them are filled from the host at once, the others fill by misses; where spare memory is not
    enough for the restored ones, they replace ended units. ``state``: for people and metrics.
    """

    adopt_units: int
    restore_units: int
    state: ResidencyState


class History(NamedTuple):
    """What one ``reconcile`` leaves for the next.

    ``is_growing``: spare memory was above the high watermark, and not at the low one since.
    ``dwell_left_steps``: steps until growth may start again.
    ``missed_rows``: rows fetched while growing that no adopted unit stands for, below 64.
    """

    is_growing: bool = False
    dwell_left_steps: int = 0
    missed_rows: int = 0


class Decision(NamedTuple):
    """Targets of this step, and the history to hand to the next ``reconcile``."""

    targets: Targets
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyController:
    """Settings and rules of optional residency.

    Attributes:
        head_reserve_blocks: plain free blocks at the head of vLLM's free queue, as many as
            one scheduler step can take. vLLM reuses blocks from the head and released
            units join the tail, so without it optional units would outlive cached
            prefixes (19 % fewer prefix-hit tokens in a measured mix).
        growth_horizon_steps: steps of the running requests' growth kept free of optional
            units: the steps in flight and the one being scheduled, twice.
        dwell_steps: steps without pressure before growth starts again. Pressure is never
            delayed, so growth starts again at most once in this time.
        low_watermark_ratio: growth ends when spare memory is this share of the pool.
        high_watermark_ratio: growth starts when it is above this share. The gap keeps
            small changes of load from starting it.
        adopt_units_per_step: bound on adoption, since adopting costs the scheduler time.
        restore_rows_per_step: rows that may cross the host link in a step before
            restoring counts as disturbing it; misses come first.

    Raises:
        ValueError: a setting is out of its range; the message names it.

    """

    head_reserve_blocks: int
    growth_horizon_steps: int = 4
    dwell_steps: int = 16
    low_watermark_ratio: float = 0.01
    high_watermark_ratio: float = 0.03
    adopt_units_per_step: int = 32
    restore_rows_per_step: int = 2048

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_ratio = field.name.endswith("_ratio")
            kinds: tuple[type, ...] = (int, float) if is_ratio else (int,)
            top = 1.0 if is_ratio else float("inf")
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= top:
                wanted = "a share from 0 to 1" if is_ratio else "a whole number, 0 or more"
                raise ValueError(f"{field.name} must be {wanted}; got {value!r}")
        if self.low_watermark_ratio > self.high_watermark_ratio:
            raise ValueError(
                f"low_watermark_ratio must not be above high_watermark_ratio;"
                f" got {self.low_watermark_ratio} and {self.high_watermark_ratio}"
            )

    def adoptable_blocks(self, seen: Pressure) -> int:
        """Return plain blocks that are truly spare, those of ended units among them.

        Where there are more cached prefixes than the growth reserve, they are that reserve.
        """
        growth_reserve_blocks = self._growth_reserve_blocks(seen)
        return self._spare_blocks(seen) - max(seen.cached_blocks - growth_reserve_blocks, 0)

    def _growth_reserve_blocks(self, seen: Pressure) -> int:
        return max(seen.waiting_blocks, self.growth_horizon_steps * seen.growth_blocks)

    def _spare_blocks(self, seen: Pressure) -> int:
        """Return free blocks that nothing will use; negative when optional units overlap.

        That is neither optional units nor one step (the head reserve) nor the next
        request and the next steps of the running ones (the growth reserve). So
        growth never runs into the next admission. What ended requests left is spare.
        """
        return (
            seen.free_blocks
            - (seen.optional_units - seen.ended_units) * seen.blocks_per_unit
            - self.head_reserve_blocks
            - self._growth_reserve_blocks(seen)
        )

    def reconcile(self, seen: Pressure, history: History) -> Decision:
        """Decide this step from what is seen; equal arguments give an equal decision.

        Growth starts above the high watermark, once ``dwell_steps`` have passed since the
        last pressure, and ends at the low one; in between it goes on as it was. Nothing
        is adopted while a request waits.
        """
        _check(seen)
        adoptable = self.adoptable_blocks(seen)
        is_pressed = seen.lost_units > 0 or self._spare_blocks(seen) < 0
        dwell_left = self.dwell_steps if is_pressed else max(0, history.dwell_left_steps - 1)
        floor = int(self.low_watermark_ratio * seen.total_blocks)
        start = self.high_watermark_ratio * seen.total_blocks
        is_allowed = not is_pressed and not dwell_left
        is_growing = is_allowed and adoptable > (floor if history.is_growing else start)
        growth = _NO_GROWTH
        if is_growing and not seen.waiting_blocks:
            room_units = (adoptable - floor) // seen.blocks_per_unit
            growth = self._growth(seen, room_units, history.missed_rows)
        state: ResidencyState = "grow" if growth.adopt_units else "hold"
        if seen.lost_units:
            state = "reclaim"
        elif is_pressed and seen.optional_units:
            state = "shrink"
        return Decision(
            Targets(growth.adopt_units, growth.restore_units, state),
            History(is_growing, dwell_left, growth.missed_rows),
        )

    def _growth(self, seen: Pressure, room_units: int, missed_rows: int) -> "_Growth":
        """Size one step of growth.

        Growth is lazy: misses fill a unit, so units beyond the rows fetched so far would
        stand empty while older ones are given up for them. That misses as little as having
        all memory at once, and ends by itself where nothing is missed, so no working set
        has to be estimated. Restoring has what the misses leave of the link.
        """
        # Misses replace rows of ended units by themselves; only whole spans need the unit.
        empty_units = max(0, room_units - seen.ended_units)
        room_units = min(room_units, self.adopt_units_per_step)
        missed_rows += seen.fetched_rows
        filled = min(missed_rows // UNIT_ROWS, room_units, empty_units)
        missed_rows -= filled * UNIT_ROWS
        idle_rows = max(0, self.restore_rows_per_step - seen.fetched_rows)
        restored = min(seen.restorable_units, idle_rows // UNIT_ROWS, room_units - filled)
        # What did not fit is missed again if it matters; it is no claim on later room.
        return _Growth(filled + restored, restored, min(missed_rows, UNIT_ROWS - 1))


class _Growth(NamedTuple):
    adopt_units: int
    restore_units: int
    missed_rows: int


_NO_GROWTH = _Growth(0, 0, 0)


def _check(seen: Pressure) -> None:
    assert min(seen) >= 0, "a negative level"
    assert seen.blocks_per_unit > 0
    assert seen.free_blocks <= seen.total_blocks
    assert seen.ended_units <= seen.optional_units
    used_blocks = seen.optional_units * seen.blocks_per_unit + seen.cached_blocks
    assert used_blocks <= seen.free_blocks, "a free block has two uses"
