"""The scheduler iterations of one GPU in virtual time."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.drafts import draft_limit
from vllm_dhisparse.simulator.fidelity import Asking, Fidelity, Found, Pages
from vllm_dhisparse.simulator.loads import Arrival, Load
from vllm_dhisparse.simulator.memory import Levels, Memory
from vllm_dhisparse.simulator.speculation import Speculation
from vllm_dhisparse.simulator.step_time import Hardware, StepLoad, StepParts
from vllm_dhisparse.simulator.streams import Place


class Step(NamedTuple):
    """What one iteration did.

    ``start_s``: virtual time; ``phase``: of the load; ``running``, ``waiting``: requests;
    ``tokens``: accepted; ``queries``; ``selected``: rows by tier, see `Found`; ``fetched``,
    ``restored``: rows; ``levels``: blocks after it; ``state``: of the controller;
    ``pressure``: share of the pool that is required; ``preempted``: requests; ``parts``: ms.
    """

    start_s: float
    phase: int
    running: int
    waiting: int
    tokens: int
    queries: int
    selected: NDArray[np.float64]
    fetched: float
    restored: int
    levels: Levels
    state: str
    pressure: float
    preempted: int
    parts: StepParts


@dataclass(eq=False)
class Request:
    """A request from arrival to end; ``accepted`` by step, ``generated`` is their sum."""

    arrival: Arrival
    place: Place
    arrived_s: float
    accepted: list[int] = field(default_factory=list)
    generated: int = 0
    page_table: Pages = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def id(self) -> str:
        """Name in ledger and pages."""
        return str(self.arrival.number)

    @property
    def tokens(self) -> int:
        """Tokens before the next step."""
        return self.place.context + self.generated


class Engine:
    """One GPU: admission and preemption as vLLM's, memory by the package, time by a model.

    Args:
        load: who asks.
        memory: blocks and pages.
        fidelity: row caches.
        hardware: step times.
        speculation: drafts.
        scale: tokens of the real model that a simulated one stands for.
        seed: of acceptance.
        max_requests: running at a time, at most.
        checks: whether the books are checked in every step.

    """

    def __init__(
        self,
        load: Load,
        memory: Memory,
        fidelity: Fidelity,
        hardware: Hardware,
        speculation: Speculation,
        scale: float = 1.0,
        seed: int = 0,
        max_requests: int = 1024,
        checks: bool = False,
    ) -> None:
        self.memory = memory
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self._load = load
        self._source = load.source()
        self._fidelity = fidelity
        self._hardware = hardware
        self._speculation = speculation
        self.scale = scale
        self._seed = seed
        self._max_requests = max_requests
        self._checks = checks
        self._waiting: deque[Request] = deque()
        self._time_s = 0.0
        self._most_fetched = 0
        self._queries = speculation.queries

    def run(self) -> Iterator[Step]:
        """Do all steps of the load."""
        for number in range(self._load.steps):
            yield self._step(number)

    def _step(self, number: int) -> Step:
        self._arrive(number)
        preempted = self._grow()
        waiting_blocks = self._admit()
        memory, queries = self.memory, self._queries
        memory.bind()
        state = memory.adapt(waiting_blocks, len(self.running) * queries, self._most_fetched)
        restored = self._fidelity.apply(memory.ledger.take_commands())
        asking = [self._ask(request) for request in self.running]
        found = self._fidelity.resolve(asking) if asking else Found.nothing()
        self._most_fetched = found.most_fetched
        if self._checks:
            memory.check_integrity()
        levels = memory.levels()
        required = levels.tail + levels.required + levels.indexer + levels.ring
        step = Step(
            start_s=self._time_s,
            phase=self._load.phase_at(number),
            running=len(asking),
            waiting=len(self._waiting),
            tokens=sum(request.accepted for request in asking),
            queries=len(asking) * queries,
            selected=found.selected,
            fetched=found.fetched,
            restored=restored,
            levels=levels,
            state=state,
            pressure=min((required + waiting_blocks) / memory.pool.num_blocks, 1.0),
            preempted=preempted,
            parts=self._time(asking, found.fetched, restored),
        )
        self._time_s += step.parts.total / 1e3
        self._finish(asking)
        self._queries = 1 + self._draft_limit(waiting_blocks)
        return step

    def _draft_limit(self, waiting_blocks: int) -> int:
        """Return the drafts of the next step; only ``adaptive`` shortens them."""
        drafts, memory = self._speculation.queries - 1, self.memory
        if not drafts or not memory.is_adaptive:
            return drafts
        requests = len(self.running)
        return draft_limit(
            drafts,
            memory.pool.num_free,
            waiting_blocks,
            lambda length: memory.growth_blocks(requests * (1 + length)),
        )

    def _arrive(self, number: int) -> None:
        if not self.running and not self._waiting:
            self._time_s = max(self._time_s, self._source.next_time() or 0.0)
        present = len(self.running) + len(self._waiting)
        arrived, surplus = self._source.due(number, self._time_s, present)
        drafts = self._speculation.queries - 1
        for arrival in arrived:
            place = self._fidelity.place(arrival, drafts)
            self._waiting.append(Request(arrival, place, self._time_s))
        for _ in range(surplus):
            if self._waiting:
                self._waiting.pop()
            else:
                self.memory.end(self.running.pop().id)

    def _grow(self) -> int:
        """Make room for the step's tokens, if need be by preempting the newest; return how many."""
        preempted = 0
        for request in list(self.running):
            if request not in self.running:
                continue
            needed = request.tokens + self._queries
            while not self.memory.can_grow(request.id, needed):
                last = self.running.pop()
                self.memory.end(last.id)
                self._waiting.appendleft(last)
                preempted += 1
                if last is request:
                    break
            else:
                self.memory.grow(request.id, needed)
        if preempted and not self.running:
            raise ValueError("the device cannot hold one request; give it more memory")
        return preempted

    def _admit(self) -> int:
        """Start who fits; return the blocks that the next one waits for."""
        memory, queries = self.memory, self._queries
        while self._waiting and len(self.running) < self._max_requests:
            request = self._waiting[0]
            if not memory.fits(request.id, request.tokens, queries):
                needed = memory.required_blocks(request.tokens, queries)
                if not self.running and needed > memory.pool.num_free:
                    raise ValueError(
                        f"a request of {request.tokens * self.scale:.0f} tokens needs {needed}"
                        f" blocks; the device has {memory.pool.num_blocks}"
                    )
                if not self.running:
                    raise ValueError(
                        f"a request of {request.tokens * self.scale:.0f} tokens does not fit in"
                        " host memory"
                    )
                return needed if needed > memory.pool.num_free else 0
            self._waiting.popleft()
            self._start(request)
            self.running.append(request)
        return 0

    def _start(self, request: Request) -> None:
        memory, queries = self.memory, self._queries
        request.page_table = np.zeros(0, dtype=np.int64)
        if self._load.imported or memory.is_resident:
            first = memory.admit(request.id, request.tokens, queries)
            memory.bind()
            self._write(request, first, request.tokens)
            return
        chunk = max(UNIT_ROWS, ceil(2048 / self.scale / UNIT_ROWS) * UNIT_ROWS)
        end = min(chunk, request.tokens)
        first = memory.admit(request.id, 0, end)
        while True:
            memory.bind()
            self._write(request, first, end)
            memory.process(request.id, end)
            if end == request.tokens:
                break
            first, end = end, min(end + chunk, request.tokens)
            memory.grow(request.id, end)
        memory.grow(request.id, request.tokens + queries)

    def _ask(self, request: Request) -> Asking:
        queries, number = self._queries, request.arrival.number
        accepted = self._speculation.draw(self._seed, number, request.generated, queries - 1)
        accepted = min(accepted, request.arrival.output_tokens - request.generated)
        self._write(request, request.tokens, request.tokens + queries)
        return Asking(
            number,
            request.place,
            request.tokens,
            request.generated,
            queries,
            accepted,
            request.page_table,
        )

    def _write(self, request: Request, first: int, end: int) -> None:
        """Write rows; the commands that gave them their places are applied first."""
        memory = self.memory
        blocks = memory.held[request.id].indexer
        if len(blocks) != request.page_table.size:
            pages = [memory.pages.page_of(block) for block in blocks]
            request.page_table = np.array(pages, dtype=np.int64)
        self._fidelity.apply(memory.ledger.take_commands())
        if first < end:
            units = range(first // UNIT_ROWS, ceil(end / UNIT_ROWS))
            tail = [memory.ledger.tail_block(request.id, unit, 0) for unit in units]
            self._fidelity.write(request.page_table, first, end, tail)

    def _time(self, asking: list[Asking], fetched: float, restored: int) -> StepParts:
        return self._hardware.step(
            StepLoad(
                requests=len(asking),
                queries=len(asking) * self._queries,
                context_tokens=sum(request.tokens for request in asking) * self.scale,
                fetched_rows=fetched * self.scale,
                restored_rows=restored * self.scale,
                is_on_host=not self.memory.is_resident,
                has_drafts=self._queries > 1,
            )
        )

    def _finish(self, asking: list[Asking]) -> None:
        still = []
        for request, asked in zip(self.running, asking, strict=True):
            request.accepted.append(asked.accepted)
            request.generated += asked.accepted
            if request.first_token_s is None:
                request.first_token_s = self._time_s
            if request.generated < request.arrival.output_tokens:
                self.memory.process(request.id, request.tokens)
                still.append(request)
                continue
            request.finished_s = self._time_s
            self.memory.end(request.id)
            self.finished.append(request)
        self.running = still
