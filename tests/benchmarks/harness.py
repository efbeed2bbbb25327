"""Registry of benchmarks, and timing by interleaved repeats."""

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple


class Sizes(NamedTuple):
    """How much a benchmark measures; names of figures say the full sizes."""

    requests: int
    few_requests: int
    context: int
    top_k: int
    gathered_rows: int
    scheduled_contexts: tuple[int, int]  # tokens of a request in the block managers
    least_repeats: int


FULL = Sizes(128, 4, 100_000, 2048, 8192, (10_000, 100_000), 9)
TINY = Sizes(2, 2, 2000, 64, 128, (1000, 2000), 2)


class Figure(NamedTuple):
    """One measured figure, beside its baseline from the same run if it has one.

    ``ratio``: value / baseline.
    """

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None

    def __str__(self) -> str:
        text = f"{self.name:72} {self.value:10.3f} {self.unit:5}"
        if self.baseline is None:
            return text
        return f"{text} baseline {self.baseline:10.3f}  ratio {self.ratio:6.3f}"


Benchmark = Callable[[Sizes], Iterable[Figure]]
BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register a function that returns figures."""

    def register(function: Benchmark) -> Benchmark:
        BENCHMARKS[name] = function
        return function

    return register


def figure(name: str, value: float, unit: str, baseline: float | None = None) -> Figure:
    return Figure(name, value, unit, baseline, None if baseline is None else value / baseline)


def medians(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Median milliseconds of thread time of each function, one call of each in turn.

    Thread time leaves out what other programs on the machine take.
    """
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, collected in zip(functions, times, strict=True):
            start = time.thread_time()
            function()
            collected.append(1e3 * (time.thread_time() - start))
    return [median(collected) for collected in times]
