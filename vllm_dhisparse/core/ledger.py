"""The unit ledger: which device blocks hold latent rows, and what for.

One ledger serves all latent KV groups of an engine, so a unit is whole in all of
them or gone. It keeps state and executes; how much to hold is its caller's decision.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, islice
from typing import Literal, NamedTuple, TypeAlias

from vllm_dhisparse.core.block_source import BlockSource
from vllm_dhisparse.core.commands import Command, UnitAdded, UnitLost, UnitMoved, UnitState
from vllm_dhisparse.core.shares import Shares
from vllm_dhisparse.core.spans import MissingSpans, PlacedSpans, Span

LedgerResidency: TypeAlias = Literal["fixed", "adaptive"]


class LedgerLevels(NamedTuple):
    """Units by state, and free blocks (those of optional units among them)."""

    free_blocks: int
    tail_units: int
    required_units: int
    optional_units: int


class Ledger:
    """Units of one engine by state.

    Tail units belong to a request and a position; their blocks are given back by
    vLLM when the request ends. Required units are pinned, as many as ``core.shares``
    says, and belong to nobody in particular. Optional units lie in the free queue and are
    readable until the pool hands one of their blocks out.

    Args:
        source: the pool.
        num_groups: latent KV groups, the blocks of one unit.
        base_units: required units of a running request at most.
        residency: ``adaptive`` keeps full tails and released shares as optional
            units; ``fixed`` frees them, so that required units are all there is.
        log: where the commands go, in the order things happen.
        missing: told which spans of running requests lose their unit.

    """

    def __init__(
        self,
        source: BlockSource,
        num_groups: int,
        base_units: int,
        residency: LedgerResidency,
        log: list[Command],
        missing: MissingSpans | None = None,
    ) -> None:
        assert num_groups > 0
        self.num_groups = num_groups
        self._shares = Shares(base_units)
        self._source = source
        self._keeps_units = residency == "adaptive"
        self._log = log
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._free_numbers: list[int] = []
        # unit by position; positions are consecutive, and only the newest are here
        self._tails: dict[str, dict[int, int]] = {}
        # insertion order is age, oldest first
        self._required: dict[int, None] = {}
        self._optional: dict[int, None] = {}
        self._optional_of_block: dict[int, int] = {}
        self._missing = MissingSpans() if missing is None else missing
        self.spans = PlacedSpans()
        # optional units with a span of a request that has ended, oldest end first
        self._ended: dict[int, None] = {}
        self._num_reclaimed = 0
        source.add_reuse_listener(self._lose_unit_of)

    @property
    def max_units(self) -> int:
        """Unit numbers are below this."""
        return max_units(self._source.num_blocks, self.num_groups)

    def levels(self) -> LedgerLevels:
        """Return what is held now; its cost grows with the running requests only."""
        return LedgerLevels(
            free_blocks=self._source.num_free,
            tail_units=sum(map(len, self._tails.values())),
            required_units=len(self._required),
            optional_units=len(self._optional),
        )

    @property
    def num_ended(self) -> int:
        """Optional units that hold what ended requests left."""
        return len(self._ended)

    def is_running(self, request_id: str) -> bool:
        """Whether the request has claimed its base share."""
        return request_id in self._tails

    @property
    def base_units(self) -> int:
        """Required units of a running request at most."""
        return self._shares.base_units

    def missing_units(self, history_units: int = 0, shared_units: int = 0) -> int:
        """Return required units that are not held, with those of one more request.

        Args:
            history_units: of its prefix hit.
            shared_units: those of them that running requests have too.

        """
        required = self._shares.required_units(history_units, shared_units)
        return max(required - len(self._required), 0)

    def claim_share(self, request_id: str, history_units: int, shared_units: int = 0) -> None:
        """Pin what is missing for a request that starts to run; see ``missing_units``.

        The newest optional units are pinned first, since their rows are the likeliest
        to be read again; the rest is allocated. Admission has made sure of the room.
        """
        assert request_id not in self._tails
        self._tails[request_id] = {}
        self._shares.start(request_id, history_units, shared_units)
        self.spans.start(request_id)
        self._missing.start(request_id)
        self._require(self.missing_units())

    def settle(self, shared_units: int) -> None:
        """Note what running requests share, see ``core.shares``, and release the surplus."""
        self._shares.shared_units = shared_units
        self._release_required(max(len(self._required) - self._shares.required_units(), 0))

    def grow_tail(self, request_id: str, first_position: int, num_units: int) -> None:
        """Allocate the tail units at ``first_position`` and the positions after it."""
        tail = self._tails[request_id]
        end = self._shares.history_units(request_id) + len(tail)
        assert first_position == end, "a tail with a gap"
        units = self._allocate(num_units, UnitState.TAIL)
        tail.update(zip(range(first_position, first_position + num_units), units, strict=True))

    def tail_block(self, request_id: str, position: int, group: int) -> int:
        """Return the block of one latent group in the tail unit at ``position``."""
        return self._blocks[self._tails[request_id][position]][group]

    def absorb_tail(self, request_id: str, end_position: int) -> None:
        """Take the full tail units below ``end_position`` off the request, in place.

        The first complete its share, the others are kept or freed as the residency says.
        """
        tail, history = self._tails[request_id], self._shares.history_units(request_id)
        positions = range(history, min(end_position, history + len(tail)))
        full = [tail.pop(position) for position in positions]
        for unit, position in zip(full, positions, strict=True):
            self.spans.put(unit, Span(request_id, position))
        self._shares.extend(request_id, len(full))
        missing = self.missing_units()
        for unit in full[:missing]:
            self._log.append(UnitMoved(unit, UnitState.REQUIRED))
            self._required[unit] = None
        self._retain(full[missing:])

    def fill(self, unit: int, span: Span) -> None:
        """Note that an adopted unit gets the rows of a span."""
        assert unit in self._optional
        self.spans.put(unit, span)

    def take_reclaimed(self) -> int:
        """Return how many optional units the pool took back since the last call."""
        number, self._num_reclaimed = self._num_reclaimed, 0
        return number

    def end_request(self, request_id: str, shared_units: int = 0) -> None:
        """Forget a request and release its share; unknown requests are fine.

        The blocks of its tail stay referenced: they are in vLLM's table, and vLLM frees
        them. ``shared_units`` is what the others share, see ``settle``.
        """
        tail = self._tails.pop(request_id, None)
        if tail is None:
            return
        self._missing.end(request_id)
        left = self.spans.end(request_id)
        self._ended.update(dict.fromkeys(unit for unit in left if unit in self._optional))
        for unit in tail.values():
            self._retire(unit)
        self._shares.end(request_id)
        self.settle(shared_units)

    def adopt(
        self, num_units: int, head_reserve_blocks: int, take_cached: bool = False
    ) -> list[int]:
        """Turn free blocks into optional units, at most ``num_units``.

        The first ``head_reserve_blocks`` plain free blocks are left alone. Blocks whose
        reuse costs nothing are taken first, cached prefixes (oldest first) only if
        ``take_cached``; without it nothing is adopted unless the queue's head is the
        whole reserve. The walk is bounded by what is asked for, so a queue with few
        suitable blocks near its head gives fewer units.

        Returns:
            The units adopted.

        """
        assert self._keeps_units, "fixed residency has no optional units"
        wanted = num_units * self.num_groups
        if not wanted:
            return []
        for wide in (1, 2):  # the second walk only if the first met others
            blocks, places = self._source.first_free(head_reserve_blocks + wide * wanted)
            cached = [blocks[place] for place in places]
            others = self._optional_of_block.keys() | cached if cached else self._optional_of_block
            plain = list(filterfalse(others.__contains__, blocks))
            if len(plain) >= head_reserve_blocks + wanted:
                break
        if plain[:head_reserve_blocks] != blocks[:head_reserve_blocks] and not take_cached:
            return []
        found = plain[head_reserve_blocks:]
        if take_cached:
            found += cached[: max(wanted - len(found), 0)]
        found = found[: min(wanted, len(found) // self.num_groups * self.num_groups)]
        self._source.claim(found)
        units = self._add(found, UnitState.OPTIONAL)
        self._make_readable(units)
        return units

    def recycle(self, num_units: int) -> list[int]:
        """Empty units that ended requests left, at most ``num_units``.

        Returns:
            The units, now the newest.

        """
        ended = list(islice(self._ended, num_units))
        blocks = self._blocks_of(ended)
        for unit in ended:
            self._forget_optional(unit)
            self._retire(unit)
        self._source.pin(blocks)
        units = self._add(blocks, UnitState.OPTIONAL)
        self._make_readable(units)
        return units

    def give_up(self, num_units: int) -> int:
        """Make optional units plain free blocks at the head of the queue.

        What ended requests left goes first, then the oldest.

        Returns:
            Units given up.

        """
        others = filterfalse(self._ended.__contains__, self._optional)
        units = list(islice(chain(self._ended, others), num_units))
        blocks = self._blocks_of(units)
        for unit in units:
            self._forget_optional(unit)
            self._retire(unit)
        self._source.pin(blocks)
        self._source.release(blocks)
        return len(units)

    def refill_reserve(self, head_reserve_blocks: int) -> int:
        """Give up units until the queue's head has ``head_reserve_blocks`` plain free blocks.

        With the reserve, what one step allocates comes out of optional units rather than
        out of cached prefixes, which are ahead of them in the queue.

        Returns:
            Units given up.

        """
        if not self._optional:
            return 0
        blocks, cached = self._source.first_free(head_reserve_blocks)
        ahead = blocks[: cached[0]] if cached else blocks
        plain = len(ahead) - sum(map(self._optional_of_block.__contains__, ahead))
        return self.give_up(-(-(head_reserve_blocks - plain) // self.num_groups))

    def take_commands(self) -> tuple[Command, ...]:
        """Hand over the log and start a new one."""
        commands = tuple(self._log)
        self._log.clear()
        return commands

    def blocks_by_state(self) -> dict[UnitState, list[int]]:
        """Return the block ids of all live units; for checks, its cost grows with them."""
        tails = [unit for tail in self._tails.values() for unit in tail.values()]
        return {
            UnitState.TAIL: self._blocks_of(tails),
            UnitState.REQUIRED: self._blocks_of(self._required),
            UnitState.OPTIONAL: self._blocks_of(self._optional),
        }

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        by_state = self.blocks_by_state()
        blocks = [block for ids in by_state.values() for block in ids]
        assert len(blocks) == len(set(blocks)), "a block is in two units"
        assert len(blocks) == self.num_groups * len(self._blocks), "a unit has no state"
        self._shares.check_integrity(set(self._tails))
        assert len(self._required) <= self._shares.required_units()
        assert self._keeps_units or not self._optional
        assert set(self._optional_of_block) == set(by_state[UnitState.OPTIONAL])
        assert set(self._ended) <= set(self._optional)
        self.spans.check_integrity(self._blocks, self._tails.keys())
        numbers = [*self._blocks, *self._free_numbers]
        assert sorted(numbers) == list(range(len(numbers)))
        assert all(number < self.max_units for number in self._blocks)
        for state, ids in by_state.items():
            is_pinned = state is not UnitState.OPTIONAL
            for block in ids:
                assert self._source.is_referenced(block) == is_pinned, (state, block)
                assert not self._source.is_cached(block)
        for request_id, tail in self._tails.items():
            first = self._shares.history_units(request_id)
            assert list(tail) == list(range(first, first + len(tail))), "a tail has a gap"

    def _require(self, num_units: int) -> None:
        reused = list(islice(reversed(self._optional), num_units))
        for unit in reused:
            self._forget_optional(unit)
            self._log.append(UnitMoved(unit, UnitState.REQUIRED))
        self._source.pin(self._blocks_of(reused))
        self._required.update(dict.fromkeys(reused))
        allocated = self._allocate(num_units - len(reused), UnitState.REQUIRED)
        self._required.update(dict.fromkeys(allocated))

    def _release_required(self, num_units: int) -> None:
        units = list(islice(self._required, num_units))
        for unit in units:
            del self._required[unit]
        self._retain(units)

    def _retain(self, units: Sequence[int]) -> None:
        if self._keeps_units:
            for unit in units:
                self._log.append(UnitMoved(unit, UnitState.OPTIONAL))
            self._make_readable(units)
            return
        blocks = self._blocks_of(units)
        for unit in units:
            self._retire(unit)
        self._source.release(blocks)

    def _make_readable(self, units: Sequence[int]) -> None:
        for unit in units:
            self._optional[unit] = None
            self._optional_of_block.update(dict.fromkeys(self._blocks[unit], unit))
        self._source.release_readable(self._blocks_of(units))

    def _allocate(self, num_units: int, state: UnitState) -> list[int]:
        # Numbers come after the blocks: units lost by this very allocation return theirs.
        return self._add(self._source.take(num_units * self.num_groups), state)

    def _add(self, blocks: Sequence[int], state: UnitState) -> list[int]:
        units = []
        for start in range(0, len(blocks), self.num_groups):
            unit = self._free_numbers.pop() if self._free_numbers else len(self._blocks)
            own = self._blocks[unit] = tuple(blocks[start : start + self.num_groups])
            self._log.append(UnitAdded(unit, state, own))
            units.append(unit)
        return units

    def _retire(self, unit: int) -> None:
        del self._blocks[unit]
        self._free_numbers.append(unit)
        self._log.append(UnitLost(unit))
        span = self.spans.take(unit)
        if span is not None:
            self._missing.miss([span])

    def _forget_optional(self, unit: int) -> None:
        del self._optional[unit]
        self._ended.pop(unit, None)
        for block in self._blocks[unit]:
            del self._optional_of_block[block]

    def _lose_unit_of(self, block: int) -> None:
        unit = self._optional_of_block.get(block)
        if unit is None:
            return  # a sibling of a unit that is already lost, or a block of a page
        self._forget_optional(unit)
        self._retire(unit)
        self._num_reclaimed += 1

    def _blocks_of(self, units: Iterable[int]) -> list[int]:
        return [block for unit in units for block in self._blocks[unit]]


def max_units(num_blocks: int, num_groups: int) -> int:
    """Return how many units a pool can hold; their numbers are below this."""
    return num_blocks // num_groups
