"""Optional units: free blocks put to use until the pool hands them out."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, islice

from vllm_dhisparse.core.block_source import BlockSource
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.core.plain_blocks import PlainBlocks
from vllm_dhisparse.core.units import Units


class OptionalUnits:
    """Units in the free queue, readable until the pool hands one of their blocks out.

    The blocks of a unit join the queue together and leave it in that order, so the reuse of
    the first is the loss of the unit.

    Args:
        source: the pool.
        units: of the engine.

    """

    def __init__(self, source: BlockSource, units: Units) -> None:
        self._source = source
        self._units = units
        self._plain = PlainBlocks(source)
        # Insertion order is age, oldest first. A dict would keep the places of those that went,
        # and walk over them for the oldest one.
        self._unit_of_first_block: OrderedDict[int, int] = OrderedDict()
        # units with a span of a request that has ended, oldest end first
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._num_reclaimed = 0
        source.add_reuse_listener(self._lose)

    def __len__(self) -> int:
        return len(self._unit_of_first_block)

    def __contains__(self, unit: int) -> bool:
        return self._units.blocks(unit)[0] in self._unit_of_first_block

    @property
    def num_ended(self) -> int:
        """Units that hold what ended requests left."""
        return len(self._ended)

    def units(self) -> list[int]:
        """Return all units, the oldest first; its cost grows with them."""
        return list(self._unit_of_first_block.values())

    def find_plain(self) -> int:
        """Return the plain free blocks of the pool, with those that vLLM freed lately."""
        self._plain.find(self._unit_of_first_block.__contains__)
        return len(self._plain)

    def take_reclaimed(self) -> int:
        """Return how many units the pool took back since the last call."""
        number, self._num_reclaimed = self._num_reclaimed, 0
        return number

    def release(self, units: Sequence[int]) -> None:
        """Drop a reference to units in use; they are the newest optional ones."""
        for unit in units:
            self._unit_of_first_block[self._units.blocks(unit)[0]] = unit
        self._source.release_readable(self._units.blocks_of(units))

    def pin_newest(self, num_units: int) -> list[int]:
        """Take the newest units, at most so many, back into use: their rows are likely read."""
        units = list(islice(reversed(self._unit_of_first_block.values()), num_units))
        self._forget(units)
        self._source.pin(self._units.blocks_of(units))
        return units

    def end(self, units: Iterable[int]) -> None:
        """Note that these units hold what a request left; those in use are fine."""
        self._ended.update(dict.fromkeys(filter(self.__contains__, units)))

    def adopt(self, num_units: int, head_reserve_blocks: int) -> list[int]:
        """Turn plain free blocks into empty units, at most ``num_units``.

        ``head_reserve_blocks`` of the plain blocks are left alone. Blocks of cached prefixes
        are never taken: what is not plain costs prefix hits.

        Returns:
            The units adopted.

        """
        num_groups = self._units.num_groups
        spare_units = (self.find_plain() - head_reserve_blocks) // num_groups
        return self._add(self._plain.take(max(min(num_units, spare_units), 0) * num_groups))

    def recycle(self, num_units: int) -> list[int]:
        """Empty units that ended requests left, at most ``num_units``.

        Returns:
            The units, now the newest.

        """
        return self._add(self._empty(list(islice(self._ended, num_units))))

    def give_up(self, num_units: int) -> int:
        """Make units plain free blocks at the head of the queue.

        What ended requests left goes first, then the oldest.

        Returns:
            Units given up.

        """
        others = filterfalse(self._ended.__contains__, self._unit_of_first_block.values())
        units = list(islice(chain(self._ended, others), num_units))
        self._plain.put(self._empty(units))
        return len(units)

    def refill_reserve(self, head_reserve_blocks: int) -> int:
        """Give up units until the queue's head has ``head_reserve_blocks`` plain free blocks.

        With the reserve, what one step allocates comes out of optional units rather than
        out of cached prefixes, which are ahead of them in the queue.

        Returns:
            Units given up.

        """
        missing_blocks = head_reserve_blocks - self.find_plain()
        return self.give_up(max(-(-missing_blocks // self._units.num_groups), 0))

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self._plain.check_integrity()
        for first, unit in self._unit_of_first_block.items():
            assert self._units.blocks(unit)[0] == first
        assert self._ended.keys() <= set(self.units())

    def _add(self, blocks: Sequence[int]) -> list[int]:
        units = self._units.add(blocks, UnitState.OPTIONAL)
        self.release(units)
        return units

    def _empty(self, units: Sequence[int]) -> list[int]:
        """Retire units, and return their blocks, pinned."""
        blocks = self._units.blocks_of(units)
        self._forget(units)
        for unit in units:
            self._units.retire(unit)
        self._source.pin(blocks)
        return blocks

    def _forget(self, units: Iterable[int]) -> None:
        for unit in units:
            del self._unit_of_first_block[self._units.blocks(unit)[0]]
            self._ended.pop(unit, None)

    def _lose(self, block: int) -> None:
        if self._plain.discard(block):
            return
        unit = self._unit_of_first_block.get(block)
        if unit is not None:  # else a block of a page, or another one of a unit just lost
            self._forget([unit])
            self._units.retire(unit)
            self._num_reclaimed += 1
