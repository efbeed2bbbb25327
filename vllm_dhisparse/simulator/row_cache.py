"""The row cache of one index group: which rows have a slot, and which are fetched.

The same steps as the data plane's ``resolve``, bit for bit, without the plan that reads
the rows: one union over all selections of a step, missing rows in ascending order, slots
by ``core.clock``.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE
from vllm_dhisparse.core.commands import UNIT_ROWS, UnitState
from vllm_dhisparse.simulator.native import compiled

NO_SLOT = -1
NO_ROW = -1
TIERS = len(UnitState)
_HOST = int(UnitState.DEAD)
_HAND, _EMPTY, _STEP = range(3)

Rows: TypeAlias = NDArray[np.int32]
Counts: TypeAlias = NDArray[np.int64]


class Resolved(NamedTuple):
    """``selected``: int64 [4], selected rows by ``UnitState`` of where they were found, DEAD =
    host; duplicates count. ``fetched``: distinct missing rows, ascending."""

    selected: Counts
    fetched: Rows


class RowCache:
    """Slots of one index group.

    Args:
        num_rows: host rows.
        num_units: units that may exist; a unit has 64 slots.
        replaces_optional: whether rows in optional units give way to others, as the data
            plane lets them; else only required units are a cache, and optional ones are
            history that stays as it is until the unit is lost, as vLLM's own pages do.

    """

    def __init__(self, num_rows: int, num_units: int, replaces_optional: bool = True) -> None:
        slots = num_units * UNIT_ROWS
        self.slot_of_row: Rows = np.full(num_rows, NO_SLOT, dtype=np.int32)
        self.row_of_slot: Rows = np.full(slots, NO_ROW, dtype=np.int32)
        self.age = np.zeros(slots, dtype=np.uint8)
        self.state = np.full(slots, UnitState.DEAD, dtype=np.uint8)
        self._replaceable = np.zeros(TIERS, dtype=np.bool_)
        self._replaceable[UnitState.REQUIRED] = True
        self._replaceable[UnitState.OPTIONAL] = replaces_optional
        self._used = np.full(slots, -1, dtype=np.int64)
        self._scalars = np.zeros(3, dtype=np.int64)

    @property
    def hand(self) -> int:
        """The slot where the next search for a victim starts."""
        return int(self._scalars[_HAND])

    @property
    def filled(self) -> int:
        """Slots with a row."""
        return int((self.row_of_slot >= 0).sum())

    def mark_empty(self) -> None:
        """Note that a slot may have become empty."""
        self._scalars[_EMPTY] = 1

    def set_state(self, unit: int, state: UnitState) -> None:
        """A unit changes its use; its rows stay."""
        slots = self._slots(unit)
        self.state[slots] = state
        self.mark_empty()

    def clear_unit(self, unit: int) -> None:
        """The unit is gone, and its rows with it."""
        slots = self._slots(unit)
        rows = self.row_of_slot[slots]
        self.slot_of_row[rows[rows >= 0]] = NO_SLOT
        self.row_of_slot[slots] = NO_ROW
        self.age[slots] = FRESH_AGE
        self.state[slots] = UnitState.DEAD

    def clear_rows(self, first: int, count: int) -> None:
        """Host rows get a new owner; no slot holds them any more."""
        slots = self.slot_of_row[first : first + count]
        slots = slots[slots >= 0]
        self.row_of_slot[slots] = NO_ROW
        self.age[slots] = FRESH_AGE
        self.slot_of_row[first : first + count] = NO_SLOT
        self.mark_empty()

    def publish(self, rows: Rows, slots: Rows) -> None:
        """Rows were written into slots of a tail."""
        old = self.slot_of_row[rows]
        old = old[old >= 0]
        self.row_of_slot[old] = NO_ROW
        self.age[old] = FRESH_AGE
        before = self.row_of_slot[slots]
        self.slot_of_row[before[before >= 0]] = NO_SLOT
        self.slot_of_row[rows] = slots
        self.row_of_slot[slots] = rows
        self.age[slots] = FRESH_AGE
        self.mark_empty()

    def enter_span(self, unit: int, first_row: int) -> int:
        """Put the rows of a span without a slot into an empty unit; return how many."""
        slots = np.arange(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS, dtype=np.int32)
        assert (self.row_of_slot[slots] < 0).all(), "a span is restored into a unit with rows"
        rows = np.arange(first_row, first_row + UNIT_ROWS, dtype=np.int32)
        absent = self.slot_of_row[rows] < 0
        self.slot_of_row[rows[absent]] = slots[absent]
        self.row_of_slot[slots[absent]] = rows[absent]
        self.age[slots] = FRESH_AGE
        return int(absent.sum())

    def resolve(self, rows: Rows) -> Resolved:
        """Serve all selections of a step, and let the missing rows in.

        Args:
            rows: int32, any shape - host rows selected; ``NO_ROW`` = unused place.

        """
        flat = np.ascontiguousarray(rows).reshape(-1)
        selected = np.zeros(TIERS, dtype=np.int64)
        fetched = _resolve(
            flat,
            selected,
            self.slot_of_row,
            self.row_of_slot,
            self.age,
            self.state,
            self._replaceable,
            self._used,
            self._scalars,
        )
        return Resolved(selected, fetched)

    def check_integrity(self) -> None:
        """Assert that both maps agree and that only live units hold rows."""
        rows = np.flatnonzero(self.slot_of_row >= 0)
        assert (self.row_of_slot[self.slot_of_row[rows]] == rows).all(), "a slot has another row"
        assert rows.size == self.filled, "a row is in two slots"
        assert (self.row_of_slot[self.state == UnitState.DEAD] == NO_ROW).all(), "a dead unit"
        assert self.age.size == 0 or self.age.max() <= MAX_AGE

    @staticmethod
    def _slots(unit: int) -> slice:
        return slice(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)


@compiled
def _resolve(
    rows: Rows,
    selected: Counts,
    slot_of_row: Rows,
    row_of_slot: Rows,
    age: NDArray[np.uint8],
    state: NDArray[np.uint8],
    replaceable: NDArray[np.bool_],
    used: Counts,
    scalars: Counts,
) -> Rows:
    scalars[_STEP] += 1
    step, num_slots = scalars[_STEP], row_of_slot.size
    missing = np.empty(rows.size, dtype=np.int32)
    hits = np.empty(rows.size, dtype=np.int32)
    number = num_hits = 0
    for row in rows:
        if row < 0:
            continue
        slot = slot_of_row[row]
        if slot < 0:
            selected[_HOST] += 1
            missing[number] = row
            number += 1
            continue
        selected[state[slot]] += 1
        if used[slot] != step:
            used[slot] = step
            hits[num_hits] = slot
            num_hits += 1
    fetched = np.unique(missing[:number])
    entering = fetched.size

    done = 0
    if scalars[_EMPTY]:  # whether there may be an empty slot
        found = False
        for place in range(num_slots):
            slot = (scalars[_HAND] + place) % num_slots
            if row_of_slot[slot] < 0 and replaceable[state[slot]]:
                if done == entering:
                    found = True
                    break
                _move_in(fetched[done], slot, slot_of_row, row_of_slot, age)
                used[slot] = step
                done += 1
        scalars[_EMPTY] = found
    if done < entering:
        victims = 0
        for slot in range(num_slots):
            if row_of_slot[slot] >= 0 and replaceable[state[slot]] and used[slot] != step:
                victims += 1
        entering = min(entering, done + victims)
    hand = scalars[_HAND]
    while done < entering:
        if row_of_slot[hand] >= 0 and replaceable[state[hand]] and used[hand] != step:
            if age[hand] > 0:
                age[hand] -= 1
            else:
                slot_of_row[row_of_slot[hand]] = NO_SLOT
                _move_in(fetched[done], hand, slot_of_row, row_of_slot, age)
                used[hand] = step
                done += 1
        hand = (hand + 1) % num_slots
    scalars[_HAND] = hand
    for slot in hits[:num_hits]:
        age[slot] = MAX_AGE
    return fetched


@compiled
def _move_in(
    row: int, slot: int, slot_of_row: Rows, row_of_slot: Rows, age: NDArray[np.uint8]
) -> None:
    row_of_slot[slot] = row
    slot_of_row[row] = slot
    age[slot] = FRESH_AGE
