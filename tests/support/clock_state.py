"""The state that `core.clock.sweep` works on, for one index group."""

import numpy as np

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE, Ages, Mask, Slots, sweep


class Clock:
    """Age of every slot, and the hand: the replacement state of one index group."""

    def __init__(self, num_slots: int) -> None:
        self.age: Ages = np.full(num_slots, FRESH_AGE, dtype=np.uint8)
        self.hand = 0

    def enter(self, slots: Slots) -> None:
        """Rows were written or fetched into these slots."""
        self.age[slots] = FRESH_AGE

    def hit(self, slots: Slots) -> None:
        """Rows in these slots were selected."""
        self.age[slots] = MAX_AGE

    def take(self, empty: Mask, replaceable: Mask, wanted: int) -> Slots:
        """Choose up to ``wanted`` slots as ``sweep`` does, and age those passed over."""
        taken, self.age, self.hand = sweep(self.age, self.hand, empty, replaceable, wanted)
        return taken

    def check_integrity(self) -> None:
        """Assert that ages fit in two bits and that the hand stands on a slot."""
        assert self.age.size == 0 or self.age.max() <= MAX_AGE, "age above its maximum"
        assert 0 <= self.hand < max(self.age.size, 1), "hand outside the slots"
