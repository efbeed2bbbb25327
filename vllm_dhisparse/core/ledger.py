"""The unit ledger: which device blocks hold latent rows, and what for.

One ledger serves all latent KV groups of an engine, so a unit is whole in all of
them or gone. It keeps state and executes; how much to hold is its caller's decision.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from vllm_dhisparse.core.block_source import BlockSource
from vllm_dhisparse.core.commands import Command, UnitMoved, UnitState
from vllm_dhisparse.core.optional_units import OptionalUnits
from vllm_dhisparse.core.shares import Shares
from vllm_dhisparse.core.spans import MissingSpans, PlacedSpans, Span
from vllm_dhisparse.core.units import Units, max_units

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
    says, and belong to nobody in particular.

    Args:
        source: the pool.
        num_groups: latent KV groups, the blocks of one unit.
        base_units: required units of a running request at most.
        residency: ``adaptive`` keeps full tails and released shares as optional
            units; ``fixed`` frees them, so that required units are all there is.
        log: where the commands go, in the order things happen.
        missing: told which spans of running requests lose their unit.

    Attributes:
        optional: units that lie in the free queue.

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
        self._shares = Shares(base_units)
        self._source = source
        self._keeps_units = residency == "adaptive"
        self._log = log
        self._missing = MissingSpans() if missing is None else missing
        self._units = Units(num_groups, log, self._missing)
        self.optional = OptionalUnits(source, self._units)
        # unit by position; positions are consecutive, and only the newest are here
        self._tails: dict[str, dict[int, int]] = {}
        self._num_tail_units = 0
        # insertion order is age, oldest first
        self._required: OrderedDict[int, None] = OrderedDict()

    @property
    def num_groups(self) -> int:
        """Blocks of a unit."""
        return self._units.num_groups

    @property
    def max_units(self) -> int:
        """Unit numbers are below this."""
        return max_units(self._source.num_blocks, self.num_groups)

    @property
    def spans(self) -> PlacedSpans:
        """What units hold."""
        return self._units.spans

    def levels(self) -> LedgerLevels:
        """Return what is held now."""
        return LedgerLevels(
            free_blocks=self._source.num_free,
            tail_units=self._num_tail_units,
            required_units=len(self._required),
            optional_units=len(self.optional),
        )

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
        self._num_tail_units += num_units

    def tail_block(self, request_id: str, position: int, group: int) -> int:
        """Return the block of one latent group in the tail unit at ``position``."""
        return self._units.blocks(self._tails[request_id][position])[group]

    def absorb_tail(self, request_id: str, end_position: int) -> None:
        """Take the full tail units below ``end_position`` off the request, in place.

        The first complete its share, the others are kept or freed as the residency says.
        """
        tail, history = self._tails[request_id], self._shares.history_units(request_id)
        positions = range(history, min(end_position, history + len(tail)))
        full = [tail.pop(position) for position in positions]
        self._num_tail_units -= len(full)
        for unit, position in zip(full, positions, strict=True):
            self.spans.put(unit, Span(request_id, position))
        self._shares.extend(request_id, len(full))
        missing = self.missing_units()
        for unit in full[:missing]:
            self._log.append(UnitMoved(unit, UnitState.REQUIRED))
            self._required[unit] = None
        self._retain(full[missing:])

    def end_request(self, request_id: str, shared_units: int = 0) -> None:
        """Forget a request and release its share; unknown requests are fine.

        The blocks of its tail stay referenced: they are in vLLM's table, and vLLM frees
        them. ``shared_units`` is what the others share, see ``settle``.
        """
        tail = self._tails.pop(request_id, None)
        if tail is None:
            return
        self._missing.end(request_id)
        self._num_tail_units -= len(tail)
        self.optional.end(self.spans.end(request_id))
        for unit in tail.values():
            self._units.retire(unit)
        self._shares.end(request_id)
        self.settle(shared_units)

    def fill(self, unit: int, span: Span, page: int, first_row: int) -> None:
        """Have an empty optional unit filled with the rows of a span of a running request.

        Args:
            unit: just adopted.
            span: whose rows.
            page: host page that holds them.
            first_row: of the span in its page.

        """
        assert unit in self.optional
        self._units.fill(unit, span, page, first_row)

    def take_commands(self) -> tuple[Command, ...]:
        """Hand over the log and start a new one."""
        commands = tuple(self._log)
        self._log.clear()
        return commands

    def blocks_by_state(self) -> dict[UnitState, list[int]]:
        """Return the block ids of all live units; for checks, its cost grows with them."""
        tails = [unit for tail in self._tails.values() for unit in tail.values()]
        return {
            UnitState.TAIL: self._units.blocks_of(tails),
            UnitState.REQUIRED: self._units.blocks_of(self._required),
            UnitState.OPTIONAL: self._units.blocks_of(self.optional.units()),
        }

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        by_state = self.blocks_by_state()
        blocks = [block for ids in by_state.values() for block in ids]
        assert len(blocks) == len(set(blocks)), "a block is in two units"
        assert len(blocks) == self.num_groups * len(self._units), "a unit has no state"
        self._shares.check_integrity(set(self._tails))
        assert self._num_tail_units == sum(map(len, self._tails.values()))
        assert len(self._required) <= self._shares.required_units()
        assert self._keeps_units or not len(self.optional)
        self.optional.check_integrity()
        self._units.check_integrity(self._tails.keys(), self.max_units)
        for state, ids in by_state.items():
            is_pinned = state is not UnitState.OPTIONAL
            for block in ids:
                assert self._source.is_referenced(block) == is_pinned, (state, block)
                assert not self._source.is_cached(block)
        for request_id, tail in self._tails.items():
            first = self._shares.history_units(request_id)
            assert list(tail) == list(range(first, first + len(tail))), "a tail has a gap"

    def _require(self, num_units: int) -> None:
        reused = self.optional.pin_newest(num_units)
        for unit in reused:
            self._log.append(UnitMoved(unit, UnitState.REQUIRED))
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
            self.optional.release(units)
            return
        blocks = self._units.blocks_of(units)
        for unit in units:
            self._units.retire(unit)
        self._source.release(blocks)

    def _allocate(self, num_units: int, state: UnitState) -> list[int]:
        # Numbers come after the blocks: units lost by this very allocation return theirs.
        return self._units.add(self._source.take(num_units * self.num_groups), state)
