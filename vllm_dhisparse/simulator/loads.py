"""Who asks when: requests over time."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Arrival(NamedTuple):
    """``number``: of the request; ``context``: tokens of its prompt; ``output_tokens``."""

    number: int
    context: int
    output_tokens: int


class Phase(NamedTuple):
    """``steps`` engine steps with ``concurrency`` requests running or waiting."""

    steps: int
    concurrency: int


@dataclass(frozen=True)
class Load:
    """A load on one GPU, closed or open.

    Attributes:
        phases: closed loop: as many requests as the phase says, a new one for each that
            ends. At a phase with fewer, the newest go at once, unfinished.
        rate_per_s: open loop, Poisson: mean arrivals in a second; phases then only give steps.
        file: open loop: a CSV file with columns time_s, context, output_tokens.
        contexts: prompt lengths, drawn with equal chance.
        output_tokens: of every request.
        imported: whether prompts were computed elsewhere and lie in host memory; else each
            is computed here before its first step, in no time.
        seed: of lengths and arrival times.

    """

    phases: tuple[Phase, ...]
    contexts: tuple[int, ...]
    output_tokens: int
    rate_per_s: float = 0.0
    file: Path | None = None
    imported: bool = True
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> int:
        """Return the number of the phase of a step."""
        number, end = 0, self.phases[0].steps
        while step >= end and number + 1 < len(self.phases):
            number += 1
            end += self.phases[number].steps
        return number

    def source(self) -> "Source":
        """Return the requests of one run."""
        return Source(self)


class Source:
    """Hands out the requests of a load as time goes by."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._random = np.random.default_rng([load.seed, 1])
        self._numbers = count()
        self._open = self._arrivals() if load.rate_per_s or load.file else None
        self._next = next(self._open, None) if self._open else None

    def due(self, step: int, time_s: float, present: int) -> tuple[list[Arrival], int]:
        """Return who arrives before a step, and how many of those present go.

        Args:
            step: number of the step.
            time_s: virtual time.
            present: requests running or waiting.

        """
        if self._open is not None:
            arrived = []
            while self._next is not None and self._next[0] <= time_s:
                arrived.append(self._next[1])
                self._next = next(self._open, None)
            return arrived, 0
        wanted = self._load.phases[self._load.phase_at(step)].concurrency
        return [self._request() for _ in range(wanted - present)], max(present - wanted, 0)

    def next_time(self) -> float | None:
        """Return when the next request arrives in an open loop; None = never, or a closed one."""
        return self._next[0] if self._next else None

    def _request(self) -> Arrival:
        context = int(self._random.choice(self._load.contexts))
        return Arrival(next(self._numbers), context, self._load.output_tokens)

    def _arrivals(self) -> Iterator[tuple[float, Arrival]]:
        if self._load.file is not None:
            yield from read_arrivals(self._load.file)
            return
        time = 0.0
        while True:
            time += self._random.exponential(1 / self._load.rate_per_s)
            yield time, self._request()


def read_arrivals(path: Path) -> list[tuple[float, Arrival]]:
    """Read arrivals from a CSV file, sorted by time.

    Raises:
        ValueError: a column is missing or holds no number; the message names file and line.

    """
    found = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                request = Arrival(line - 2, int(row["context"]), int(row["output_tokens"]))
                found.append((float(row["time_s"]), request))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {line}: needs the columns time_s, context, output_tokens: "
                    f"{error!r}"
                ) from error
    if not found:
        raise ValueError(f"{path} has no arrivals")
    return sorted(found)
