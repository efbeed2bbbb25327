"""Device blocks and host pages of one simulated GPU, kept by the package's own bookkeeping.

The moments of a step come in the order in which the engine has them: growth of running
requests, admission, binding of pages, the controller.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal, NamedTuple

from vllm_dhisparse.core.adaptation import AdaptiveResidency, HostPlace
from vllm_dhisparse.core.commands import UNIT_ROWS, Command
from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.core.ledger import Ledger
from vllm_dhisparse.core.pages import PageAllocator
from vllm_dhisparse.core.spans import MissingSpans, Span
from vllm_dhisparse.simulator.pool import SimulatedPool

PolicyName = Literal["resident", "fixed", "adaptive", "page_tail"]
POLICIES: tuple[PolicyName, ...] = ("resident", "fixed", "adaptive", "page_tail")
"""``page_tail``: as vLLM's own HiSparse: a fixed cache of each request, and whole pages of
history that stay until their memory is needed and never come back."""


class Sizes(NamedTuple):
    """``num_blocks``: of the device pool; ``num_pages``: of host memory; ``page_tokens``: of an
    indexer block and host page; ``latent_groups``: blocks of a unit; ``base_units``: required
    units of a request; ``ring_blocks``: of its draft ring."""

    num_blocks: int
    num_pages: int
    page_tokens: int
    latent_groups: int
    base_units: int
    ring_blocks: int


@dataclass
class Held:
    """What a running request holds: tokens processed and allocated, blocks by use."""

    processed: int
    allocated: int
    indexer: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)


class Levels(NamedTuple):
    """Blocks by use; they sum to the pool. ``optional`` are free in the pool's eyes."""

    tail: int
    required: int
    optional: int
    indexer: int
    ring: int
    free: int


class Memory:
    """One GPU's pool with ledger, pages and controller.

    Args:
        sizes: of pool, pages and units.
        policy: see ``POLICIES``.
        controller: of ``adaptive``; others use none.

    """

    def __init__(
        self, sizes: Sizes, policy: PolicyName, controller: ResidencyController | None = None
    ) -> None:
        assert (controller is None) == (policy != "adaptive")
        self.sizes = sizes
        self.is_resident = policy == "resident"
        self.is_adaptive = policy == "adaptive"
        self.log: list[Command] = []
        self.missing = MissingSpans()
        self.pool = SimulatedPool(sizes.num_blocks)
        self.ledger = Ledger(
            self.pool,
            sizes.latent_groups,
            0 if self.is_resident else sizes.base_units,
            "adaptive" if policy in ("adaptive", "page_tail") else "fixed",
            self.log,
            self.missing,
        )
        self.pages = PageAllocator(self.pool, sizes.num_pages, self.log)
        self.held: dict[str, Held] = {}
        self._residency: AdaptiveResidency | None = None
        if controller is not None:
            self._residency = AdaptiveResidency(
                controller, self.ledger, sizes.num_blocks, self.missing, self._place_of
            )
        self.restored_units = 0

    def fits(self, request_id: str, context: int, queries: int) -> bool:
        """Whether a new request can be admitted now."""
        pages = self._pages_for(context + queries)
        self.pages.expect_hit(request_id, ())
        return self.required_blocks(context, queries) <= self.pool.num_free and (
            self.pages.fits(request_id, pages)
        )

    def required_blocks(self, context: int, queries: int) -> int:
        """Blocks that a request takes at admission."""
        first = 0 if self.is_resident else context // UNIT_ROWS
        units = ceil((context + queries) / UNIT_ROWS) - first + self.ledger.missing_units(first)
        return (
            units * self.sizes.latent_groups
            + self._pages_for(context + queries)
            + self.sizes.ring_blocks
        )

    def admit(self, request_id: str, context: int, queries: int) -> int:
        """Start a request of whose tokens ``context`` lie in host memory.

        Returns:
            The first position that is to be written into its tail.

        """
        history = 0 if self.is_resident else context // UNIT_ROWS
        self.ledger.claim_share(request_id, history)
        self.held[request_id] = Held(history * UNIT_ROWS, history * UNIT_ROWS)
        self.held[request_id].ring = self.pool.take(self.sizes.ring_blocks)
        self.grow(request_id, context + queries)
        self.process(request_id, context)
        self.missing.miss(Span(request_id, position) for position in range(history))
        return history * UNIT_ROWS

    def can_grow(self, request_id: str, tokens: int) -> bool:
        """Whether room for ``tokens`` tokens of a running request can be had."""
        held = self.held[request_id]
        units = ceil(tokens / UNIT_ROWS) - ceil(held.allocated / UNIT_ROWS)
        pages = self._pages_for(tokens) - len(held.indexer)
        blocks = max(units, 0) * self.sizes.latent_groups + max(pages, 0)
        return blocks <= self.pool.num_free and self.pages.fits(request_id, self._pages_for(tokens))

    def grow(self, request_id: str, tokens: int) -> None:
        """Allocate tail units and indexer blocks for ``tokens`` tokens."""
        held = self.held[request_id]
        first, end = ceil(held.allocated / UNIT_ROWS), ceil(tokens / UNIT_ROWS)
        self.pages.promise(request_id, self._pages_for(tokens))
        if end > first:
            self.ledger.grow_tail(request_id, first, end - first)
        held.indexer += self.pool.take(self._pages_for(tokens) - len(held.indexer))
        held.allocated = max(held.allocated, tokens)

    def process(self, request_id: str, tokens: int) -> None:
        """The first ``tokens`` tokens are final; full tail units of them are history now."""
        self.held[request_id].processed = tokens
        if not self.is_resident:
            self.ledger.absorb_tail(request_id, tokens // UNIT_ROWS)

    def end(self, request_id: str) -> None:
        """Give back all that a request holds; it finished or was preempted."""
        held = self.held.pop(request_id)
        first = 0 if self.is_resident else held.processed // UNIT_ROWS
        tail = [
            self.ledger.tail_block(request_id, position, group)
            for position in range(first, ceil(held.allocated / UNIT_ROWS))
            for group in range(self.sizes.latent_groups)
        ]
        self.ledger.end_request(request_id)
        self.pages.end_request(request_id)
        self.pool.release([*tail, *held.indexer, *held.ring])

    def bind(self) -> None:
        """Give host pages to all new indexer blocks; the step's allocations are complete."""
        for request_id, held in self.held.items():
            new = held.indexer[self.pages.num_bound(request_id) :]
            if new:
                self.pages.bind(request_id, new)
        self.pages.end_step()

    def adapt(self, waiting_blocks: int, step_tokens: int, fetched_rows: int) -> str:
        """Let the controller use spare memory; return its state.

        Args:
            waiting_blocks: what the next waiting request requires, 0 = none waits.
            step_tokens: that the running requests may add in a step.
            fetched_rows: in the last step.

        """
        if self._residency is None:
            return "hold"
        growth_blocks = self.growth_blocks(step_tokens)
        done = self._residency.adapt(waiting_blocks, growth_blocks, fetched_rows)
        self.restored_units += done.restored_units
        return done.targets.state

    def growth_blocks(self, num_tokens: int) -> int:
        """Blocks that a step of so many tokens may take."""
        latent = ceil(num_tokens / UNIT_ROWS) * self.sizes.latent_groups
        return latent + self._pages_for(num_tokens)

    def levels(self) -> Levels:
        """Return the pool's blocks by use."""
        units, groups = self.ledger.levels(), self.sizes.latent_groups
        optional = units.optional_units * groups
        return Levels(
            tail=units.tail_units * groups,
            required=units.required_units * groups,
            optional=optional,
            indexer=sum(len(held.indexer) for held in self.held.values()),
            ring=sum(len(held.ring) for held in self.held.values()),
            free=units.free_blocks - optional,
        )

    def check_integrity(self) -> None:
        """Assert that every block has one use and every page one owner."""
        self.ledger.check_integrity()
        self.pages.check_integrity()
        assert sum(self.levels()) == self.pool.num_blocks, "a block has no use, or two"
        assert min(self.levels()) >= 0
        for held in self.held.values():
            assert len(held.ring) == self.sizes.ring_blocks, "a ring grew with its context"
        assert self.pages.num_held <= self.sizes.num_pages

    def _pages_for(self, tokens: int) -> int:
        return ceil(tokens / self.sizes.page_tokens)

    def _place_of(self, span: Span) -> HostPlace:
        token = span.position * UNIT_ROWS
        block = self.held[span.request_id].indexer[token // self.sizes.page_tokens]
        page = self.pages.page_of(block)
        assert page is not None, "a running request without a page"
        return HostPlace(page, token % self.sizes.page_tokens)
