"""Fidelity ``fluid``: rows as amounts, by miss curves; for many requests and long contexts.

Each request holds rows in order of use, and rows that were restored and not used since. Both
share the slots of all requests. What does not fit goes: first restored rows, then the rows
that were used longest ago, so that requests of like locality keep equally many. A step's
union is taken to fit in the cache, so verify steps under ``fixed`` need fidelity ``rows``.
Requests of unlike context share one curve, that of the longest. Restored rows are taken to be
the newest that are missing, which makes miss shares below a percent too small.
"""

from collections.abc import Sequence

import numpy as np

from vllm_dhisparse.core.commands import (
    UNIT_ROWS,
    Command,
    SpanRestored,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)
from vllm_dhisparse.simulator.curves import Floats, MissCurve
from vllm_dhisparse.simulator.fidelity import Asking, Found, Pages
from vllm_dhisparse.simulator.loads import Arrival
from vllm_dhisparse.simulator.streams import Place


class Fluid:
    """Row caches as curves.

    Args:
        curve: of one request.
        top_k: rows of a selection.
        rejected_price: see `Speculation`.
        is_resident: whether all history is in the tail.
        replaces_optional: see `RowCache`.

    """

    def __init__(
        self,
        curve: MissCurve,
        top_k: int,
        rejected_price: float,
        is_resident: bool = False,
        replaces_optional: bool = True,
    ) -> None:
        self._curve = curve
        self._top_k = top_k
        self._price = rejected_price
        self._is_resident = is_resident
        self._replaces_optional = replaces_optional
        self._state: dict[int, UnitState] = {}
        self._units = dict.fromkeys(UnitState, 0)
        self._used: dict[int, float] = {}
        self._whole: dict[int, float] = {}
        self._absorbed = self._restored = self._lost = 0

    def place(self, arrival: Arrival, drafts: int) -> Place:
        """Return the request's own context; every request is like the curve."""
        return Place(0, 0, arrival.context)

    def apply(self, commands: Sequence[Command]) -> int:
        """Count units and rows; return rows restored."""
        restored = 0
        for command in commands:
            match command:
                case UnitAdded(unit, state, _):
                    self._move(unit, state)
                case UnitMoved(unit, state):
                    self._absorbed += self._state[unit] is UnitState.TAIL
                    self._move(unit, state)
                case UnitLost(unit):
                    self._lost += self._state[unit] is UnitState.OPTIONAL
                    self._move(unit, UnitState.DEAD)
                    del self._state[unit]
                case SpanRestored():
                    restored += UNIT_ROWS
        self._restored += restored
        return restored

    def write(self, page_table: Pages, first: int, end: int, tail_blocks: Sequence[int]) -> None:
        """Do nothing: rows count once they leave the tail."""

    def resolve(self, requests: Sequence[Asking]) -> Found:
        """Return what the curves say, and let the amounts follow."""
        if self._is_resident:
            found = Found.nothing()
            found.selected[UnitState.TAIL] = self._top_k * sum(r.queries for r in requests)
            return found
        numbers = [request.number for request in requests]
        used = np.array([self._used.get(number, 0.0) for number in numbers])
        whole = np.array([self._whole.get(number, 0.0) for number in numbers])
        tokens = np.array([float(request.tokens) for request in requests])
        used, whole = self._settle(used, whole, tokens)
        is_full = self._is_full(float(used.sum() + whole.sum()))

        queries = np.array([float(request.queries) for request in requests])
        accepted = np.array([float(request.accepted) for request in requests])
        price = accepted + self._price * (queries - accepted)
        share = np.minimum(whole / tokens, 1.0)
        miss = self._curve.at(used, share, is_full)
        fetched = np.minimum(miss * self._top_k * price, tokens)
        without = self._curve.at(used, np.zeros_like(share), is_full)
        touched = np.minimum(np.maximum(without - miss, 0) * self._top_k, whole)
        used, whole = np.minimum(used + fetched + touched, tokens), whole - touched
        self._used = dict(zip(numbers, used.tolist(), strict=True))
        self._whole = dict(zip(numbers, whole.tolist(), strict=True))

        rows = self._top_k * queries
        selected = np.zeros(len(UnitState))
        host = (miss * rows).sum()
        selected[UnitState.DEAD] = host
        selected[UnitState.TAIL] = self._curve.tail * rows.sum()
        cached = rows.sum() - host - selected[UnitState.TAIL]
        units = self._units[UnitState.REQUIRED], self._units[UnitState.OPTIONAL]
        for state, count in zip((UnitState.REQUIRED, UnitState.OPTIONAL), units, strict=True):
            selected[state] = cached * count / max(sum(units), 1)
        return Found(selected, float(fetched.sum()), int(fetched.sum()))

    def _is_full(self, held: float) -> bool:
        slots = self._units[UnitState.REQUIRED] + self._units[UnitState.OPTIONAL]
        return held > 0.97 * slots * UNIT_ROWS

    def _move(self, unit: int, state: UnitState) -> None:
        before = self._state.get(unit)
        if before is not None:
            self._units[before] -= 1
        self._state[unit] = state
        self._units[state] += 1

    def _settle(self, used: Floats, whole: Floats, tokens: Floats) -> tuple[Floats, Floats]:
        """Let in what was absorbed and restored since the last step, and out what is too much."""
        gained = self._absorbed * UNIT_ROWS / len(used)
        self._absorbed = 0
        if self._replaces_optional:
            used = used + gained
        else:
            whole = whole + gained
        room = np.maximum(tokens - used - whole, 0)
        if self._restored:
            wanted = self._restored * room / max(room.sum(), 1e-9)
            whole = whole + np.minimum(wanted, room)
            self._restored = 0
        slots = self._units[UnitState.REQUIRED] + self._units[UnitState.OPTIONAL]
        held = (used + whole).sum()
        if self._lost and self._replaces_optional:
            kept = max(1 - self._lost / max(slots + self._lost, 1), 0.0)
            before = (slots + self._lost) * UNIT_ROWS
            if held > before * kept:  # a full cache loses the rows of its lost units
                used, whole = used * kept, whole * kept
        self._lost = 0
        if not self._replaces_optional:
            kept_whole = self._units[UnitState.OPTIONAL] * UNIT_ROWS
            whole = whole * min(1.0, kept_whole / max(whole.sum(), 1e-9))
            return _level(used, self._units[UnitState.REQUIRED] * UNIT_ROWS), whole
        over = (used + whole).sum() - slots * UNIT_ROWS
        if over > 0:
            whole = whole * (1 - min(1.0, over / max(whole.sum(), 1e-9)))
        return _level(used, max(slots * UNIT_ROWS - whole.sum(), 0.0)), whole


def _level(amounts: Floats, total: float) -> Floats:
    """Cut the largest amounts to one level, so that their sum is at most ``total``."""
    if amounts.sum() <= total:
        return amounts
    ordered = np.sort(amounts)
    below = np.concatenate([[0.0], np.cumsum(ordered)])[:-1]
    levels = (total - below) / np.arange(len(ordered), 0, -1)
    place = int(np.argmax(levels <= ordered))
    return np.asarray(np.minimum(amounts, levels[place]))
