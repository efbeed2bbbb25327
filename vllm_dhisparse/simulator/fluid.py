"""Fidelity ``fluid``: rows as amounts, by miss curves; for many requests and long contexts.

Each request holds rows in order of use, and rows that were restored and not used since. Both
share the slots of all requests. What does not fit goes: first restored rows, then the rows
that were used longest ago, so that requests of like locality keep equally many. A step's
union is taken to fit in the cache, so verify steps under ``fixed`` need fidelity ``rows``.
Requests of unlike context share one curve, that of the longest.

Under ``fixed`` and ``adaptive`` within a tenth of ``rows`` where more than three percent of a
selection is fetched. Below, less is fetched than by ``rows``: down to a quarter, by at most half
a percent of a selection. What is missing are rows that were used once and are used again: CLOCK
lets them go first, since its hand starts where misses filled the slots, and here restored rows
go before them. The curve also counts too few first uses.
"""

from collections.abc import Sequence
from typing import NamedTuple

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


class Amounts(NamedTuple):
    """Rows of each request on the device, [requests].

    ``used``: in order of use. ``reach``: newest rows of the prompt that were restored, or were
    there when they were to be; ``unused``: those of them not used since; ``whole``: of these,
    what is still there.
    """

    used: Floats
    reach: Floats
    unused: Floats
    whole: Floats

    def apart(self) -> Floats:
        """Return used rows outside the reach."""
        return np.maximum(self.used - (self.reach - self.unused), 0)

    def times(self, factor: float) -> "Amounts":
        """Return so much of all."""
        return Amounts(*(amount * factor for amount in self))


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
        self._held: dict[int, tuple[float, ...]] = {}
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
        tokens = np.array([float(request.tokens) for request in requests])
        prompt = np.array([float(request.place.context) for request in requests])
        held = np.array([self._held.get(number, (0.0,) * 4) for number in numbers])
        now = self._settle(Amounts(*held.T), tokens, prompt)
        is_full = self._is_full(float(now.used.sum() + now.whole.sum()))

        queries = np.array([float(request.queries) for request in requests])
        accepted = np.array([float(request.accepted) for request in requests])
        price = accepted + self._price * (queries - accepted)
        without = self._curve.at(now.used, np.zeros_like(tokens), is_full)
        share = np.minimum(now.reach / prompt, 1.0)
        outside = np.minimum(self._curve.at(now.apart(), share, is_full), without)
        inside = (without - outside) * self._top_k  # would miss, were nothing restored
        there = np.minimum(now.whole / np.maximum(now.unused, 1e-9), 1.0)
        touched = np.minimum(inside * there, now.whole)
        miss = without - touched / self._top_k
        fetched = np.minimum(miss * self._top_k * price, tokens)
        if not self._replaces_optional:
            touched = inside = np.zeros_like(touched)  # pages stay pages
        whole = now.whole - touched
        used = np.minimum(now.used + fetched + touched, tokens)
        unused = np.maximum(now.unused - inside, whole)
        after = np.stack([used, now.reach, unused, whole], axis=1)
        self._held = dict(zip(numbers, map(tuple, after.tolist()), strict=True))

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

    def _settle(self, held: Amounts, tokens: Floats, prompt: Floats) -> Amounts:
        """Let in what was absorbed and restored since the last step, and out what is too much."""
        absorbed, restored, lost = self._absorbed, self._restored, self._lost
        self._absorbed = self._restored = self._lost = 0
        optional = self._units[UnitState.OPTIONAL]
        slots = self._units[UnitState.REQUIRED] + optional
        gained = absorbed * UNIT_ROWS / len(tokens)
        if not self._replaces_optional:
            _, reach, unused, whole = (amount + gained for amount in held)
            kept = min(1.0, optional * UNIT_ROWS / max(whole.sum(), 1e-9))
            used = _level(held.used, self._units[UnitState.REQUIRED] * UNIT_ROWS)
            return Amounts(used, reach * kept, unused * kept, whole * kept)
        held = held._replace(used=held.used + gained)
        if restored:
            room = np.maximum(prompt - held.reach, 0)
            more = np.minimum(restored * room / max(room.sum(), 1e-9), room)
            written = np.minimum(tokens - prompt, held.used)
            there = np.maximum(held.apart() - written, 0) / np.maximum(room, 1)
            absent = more * np.maximum(1 - there, 0)
            held = Amounts(held.used, held.reach + more, held.unused + absent, held.whole + absent)
        before = (slots + lost) * UNIT_ROWS
        kept = max(1 - lost / max(slots + lost, 1), 0.0)
        if lost and (held.used + held.whole).sum() > before * kept:
            held = held.times(kept)  # a full cache loses the rows of its lost units
        over = (held.used + held.whole).sum() - slots * UNIT_ROWS
        if over > 0:
            kept = 1 - min(1.0, over / max(held.whole.sum(), 1e-9))
            held = held._replace(whole=held.whole * kept)
        return held._replace(used=_level(held.used, max(slots * UNIT_ROWS - held.whole.sum(), 0.0)))


def _level(amounts: Floats, total: float) -> Floats:
    """Cut the largest amounts to one level, so that their sum is at most ``total``."""
    if amounts.sum() <= total:
        return amounts
    ordered = np.sort(amounts)
    below = np.concatenate([[0.0], np.cumsum(ordered)])[:-1]
    levels = (total - below) / np.arange(len(ordered), 0, -1)
    place = int(np.argmax(levels <= ordered))
    return np.asarray(np.minimum(amounts, levels[place]))
