"""Runs side by side: JSON, a table, and a figure."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from vllm_dhisparse.simulator.engine import Step
from vllm_dhisparse.simulator.profiles import Kind, Profile
from vllm_dhisparse.simulator.summary import Summary

LABEL = "simulated, calibrated to published ratios, not measured"

_HEAD = ["policy", "phase", "running", "waiting", "tok/s/GPU", "TPOT p50", "p99 ms"]
_HEAD += ["fetched", "link GB/s", "optional", "preempted"]


def table(results: Mapping[str, Sequence[Summary]]) -> str:
    """Return one line for each policy and phase."""
    lines = [_HEAD]
    for policy, phases in results.items():
        for number, found in enumerate(phases):
            lines.append(
                [
                    policy,
                    str(number),
                    f"{found.running:.1f}",
                    f"{found.waiting:.1f}",
                    f"{found.output_tokens_per_s:.0f}",
                    f"{found.tpot_p50_ms:.1f}",
                    f"{found.tpot_p99_ms:.1f}",
                    f"{found.fetch_ratio:.2%}",
                    f"{found.link_gb_per_s:.1f}",
                    f"{found.device_ratio['optional']:.0%}",
                    str(found.preempted),
                ]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def provenance(profile: Profile) -> str:
    """Return how many numbers of a profile are known, and which are not."""
    counts = [f"{len(profile.of_kind(kind))} {kind}" for kind in get_args(Kind)]
    fitted, assumed = profile.of_kind("fitted"), profile.of_kind("assumed")
    return (
        f"profile {profile.name}: {', '.join(counts)}\n"
        f"  free parameters: {', '.join(fitted) or 'none'}\n"
        f"  assumed: {', '.join(assumed) or 'none'}"
    )


def to_json(
    settings: Mapping[str, Any], profile: Profile, results: Mapping[str, Sequence[Summary]]
) -> dict[str, Any]:
    """Return all of a comparison as plain numbers and text."""
    return {
        "label": LABEL,
        "settings": dict(settings),
        "profile": {
            "name": profile.name,
            "note": profile.note,
            "figures": {name: figure._asdict() for name, figure in profile.figures.items()},
        },
        "policies": {
            policy: [phase.to_json() for phase in phases] for policy, phases in results.items()
        },
    }


def draw(runs: Mapping[str, Sequence[Step]], title: str, path: Path) -> None:
    """Draw fetch ratio, memory in use and requests over time.

    Raises:
        ValueError: matplotlib is not installed.

    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'vllm-dhisparse[notebooks]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    axes: Any = figure.subplots(3, 1, sharex=True)
    for policy, steps in runs.items():
        window = max(1, len(steps) // 100)
        ends = range(window, len(steps) + 1, window)
        parts = [steps[end - window : end] for end in ends]
        fetched = [
            100 * sum(s.fetched for s in part) / max(sum(s.selected.sum() for s in part), 1)
            for part in parts
        ]
        axes[0].plot(ends, fetched, label=policy)
        optional = [100 * part[-1].levels.optional / sum(part[-1].levels) for part in parts]
        axes[1].plot(ends, optional, label=policy)
        axes[2].plot(ends, [part[-1].running for part in parts], label=policy)
    for axis, name in zip(
        axes, ("fetched / selected rows, %", "optional share of pool, %", "requests"), strict=True
    ):
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[-1].set_xlabel("step")
    figure.suptitle(f"{title}\n{LABEL}", fontsize=10)
    figure.savefig(path, dpi=120)
