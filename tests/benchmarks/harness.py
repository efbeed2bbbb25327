"""Registry of benchmarks, and timing by interleaved repeats."""

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple


class Figure(NamedTuple):
    """One measured figure beside its baseline from the same run; ``ratio`` = value / baseline."""

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.name:60} {self.value:10.3f} {self.unit:5}"
            f" baseline {self.baseline:10.3f}  ratio {self.ratio:6.3f}"
        )


Benchmark = Callable[[], Iterable[Figure]]
BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register a function that returns figures."""

    def register(function: Benchmark) -> Benchmark:
        BENCHMARKS[name] = function
        return function

    return register


def figure(name: str, value: float, unit: str, baseline: float) -> Figure:
    return Figure(name, value, unit, baseline, value / baseline)


def medians(*functions: Callable[[], object], repeats: int = 15) -> list[float]:
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
