"""CLOCK replacement: the meaning of which slot a fetched row takes.

Every slot has an age, a two-bit reference count: a hit sets it to ``MAX_AGE``, the
hand takes one away each time it passes, and a slot without any left is taken. A row
enters at ``FRESH_AGE``: a row that is used once leaves within one turn of the hand,
before any row that was used again, so a scan cannot push out what is in use.

The hand stops at the last slot it takes. Slots beyond keep their age; ageing a whole
window instead costs up to twelve times the misses.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

MAX_AGE = 3
FRESH_AGE = 0

Ages: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]
Slots: TypeAlias = NDArray[np.int64]


class Sweep(NamedTuple):
    """What one turn of the hand takes, and the state it leaves.

    ``taken``: [n] int64, in the order taken; ``age``: [num_slots] uint8, where taken
    slots are at ``FRESH_AGE``; ``hand``: the slot where the next sweep starts.
    """

    taken: Slots
    age: Ages
    hand: int


def sweep(age: Ages, hand: int, empty: Mask, replaceable: Mask, wanted: int) -> Sweep:
    """Choose up to ``wanted`` slots, in closed form over the turns of the hand.

    Empty slots go first and do not move the hand. A slot that is neither empty nor
    replaceable is passed over without ageing.

    Args:
        age: [num_slots] uint8 - at most ``MAX_AGE``; not modified.
        hand: slot where the hand stands.
        empty: [num_slots] bool - slots without a row.
        replaceable: [num_slots] bool - slots whose row may go; disjoint from ``empty``.
        wanted: number of slots asked for; fewer are taken when there are fewer.

    """
    order = (hand + np.arange(age.size)) % max(age.size, 1)
    free = order[empty[order]][:wanted]
    candidates = order[replaceable[order]]
    turns = age[candidates].astype(np.int64)  # a slot falls in the turn that its age says
    in_order = np.argsort(turns, kind="stable")[: wanted - free.size]
    new_age = age.copy()
    new_age[free] = FRESH_AGE
    if in_order.size == 0:
        return Sweep(free, new_age, hand)

    last = in_order[-1]
    passed = turns[last] + (np.arange(candidates.size) <= last)
    new_age[candidates] = np.maximum(turns - passed, 0)
    new_age[candidates[in_order]] = FRESH_AGE
    victims = candidates[in_order]
    return Sweep(np.concatenate([free, victims]), new_age, int(victims[-1] + 1) % age.size)
