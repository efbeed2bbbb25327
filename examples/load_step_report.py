"""What a load step gives: the figures of a phase, one table, one figure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = ("low", "high", "low_again")


@dataclass(frozen=True)
class Phase:
    """One phase of one residency.

    ``fetch_ratio``: fetched / selected rows while decoding; ``concurrency``: most requests
    that ran at a time; ``optional_bytes``: device memory of optional rows, median in time.
    """

    fetch_ratio: float
    concurrency: int
    output_tokens_per_s: float
    preemptions: int
    optional_bytes: int


@dataclass(frozen=True)
class Result:
    """One residency: its phases in the order of ``PHASES``, and a hash of all its tokens."""

    phases: tuple[Phase, Phase, Phase]
    outputs_sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return a mapping with one entry for each phase, and the hash."""
        named = zip(PHASES, self.phases, strict=True)
        return {name: asdict(phase) for name, phase in named} | {
            "outputs_sha256": self.outputs_sha256
        }


def table(results: Mapping[str, Result]) -> str:
    """Return all phases of all residencies, one a line."""
    columns = list(Phase.__dataclass_fields__)
    lines = [" | ".join(["residency", "phase    ", *columns])]
    for residency, result in results.items():
        for name, phase in zip(PHASES, result.phases, strict=True):
            values = [f"{value:,}".rjust(len(c)) for c, value in asdict(phase).items()]
            lines.append(" | ".join([residency.ljust(9), name.ljust(9), *values]))
    return "\n".join(lines)


def bars(results: Mapping[str, Result], width: int = 50) -> str:
    """Return the fetch ratios as bars of text, the longest of ``width`` characters."""
    most = max((p.fetch_ratio for r in results.values() for p in r.phases), default=0) or 1
    lines = ["fetch ratio"]
    for number, name in enumerate(PHASES):
        for residency, result in results.items():
            ratio = result.phases[number].fetch_ratio
            bar = "#" * round(width * ratio / most)
            lines.append(f"  {name:9} {residency:9} {ratio:7.4f} {bar}".rstrip())
    return "\n".join(lines)


def verdict(results: Mapping[str, Result]) -> str:
    """Return what the run shows, one finding a line."""
    lines = []
    if len(results) > 1:
        is_equal = len({result.outputs_sha256 for result in results.values()}) == 1
        lines.append(f"output tokens identical in all residencies: {'yes' if is_equal else 'NO'}")
    if {"fixed", "adaptive"} <= set(results):
        for number, name in ((0, "low"), (2, "low_again")):
            fixed = results["fixed"].phases[number].fetch_ratio
            adaptive = results["adaptive"].phases[number].fetch_ratio
            share = f"{adaptive / fixed:.1%} of" if fixed else "and"
            lines.append(f"fetch ratio of adaptive in {name}: {adaptive}, {share} fixed's {fixed}")
    return "\n".join(lines)


def draw(results: Mapping[str, Result], target: Path) -> None:
    """Write the fetch ratios as an image; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(results)
    for number, (residency, result) in enumerate(results.items()):
        places = [index + number * width for index in range(len(PHASES))]
        axes.bar(places, [phase.fetch_ratio for phase in result.phases], width, label=residency)
    middle = (len(results) - 1) * width / 2
    axes.set_xticks([index + middle for index in range(len(PHASES))], PHASES)
    axes.set_ylabel("fetched / selected rows")
    figure.legend(loc="outside upper center", ncols=len(results))
    figure.savefig(target)
