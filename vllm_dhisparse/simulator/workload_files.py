"""Loads as TOML files, for all GPUs of a profile together."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tomllib import TOMLDecodeError, loads
from typing import Any

from vllm_dhisparse.simulator.loads import Load, Phase

_KEYS = {"contexts", "output_tokens", "phases", "rate_per_s", "file", "imported", "seed"}


def load_named(text: str) -> Load:
    """Return a load of the package, or one from a file that ends in ``.toml``.

    Raises:
        ValueError: there is none, or it is not a load; the message says why.

    """
    if text.endswith(".toml"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"there is no workload {text}")
        return parse_load(path.stem, path.read_text(), path.parent)
    folder = files("vllm_dhisparse.simulator") / "data" / "workloads"
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())
    if text not in known:
        raise ValueError(f"unknown workload {text!r}; known: {', '.join(known)}, or a .toml file")
    return parse_load(text, (folder / f"{text}.toml").read_text(), Path())


def parse_load(name: str, text: str, folder: Path) -> Load:
    """Read a load; ``file`` is relative to ``folder``.

    Raises:
        ValueError: the text is not a load.

    """
    try:
        document: dict[str, Any] = loads(text)
    except TOMLDecodeError as error:
        raise ValueError(f"workload {name} is not TOML: {error}") from error
    unknown = set(document) - _KEYS
    if unknown:
        raise ValueError(
            f"workload {name}: unknown {', '.join(sorted(unknown))}; known: "
            f"{', '.join(sorted(_KEYS))}"
        )
    try:
        phases = tuple(Phase(int(p["steps"]), int(p["concurrency"])) for p in document["phases"])
        load = Load(
            phases=phases,
            contexts=tuple(int(context) for context in document["contexts"]),
            output_tokens=int(document["output_tokens"]),
            rate_per_s=float(document.get("rate_per_s", 0.0)),
            file=folder / document["file"] if "file" in document else None,
            imported=bool(document.get("imported", True)),
            seed=int(document.get("seed", 0)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"workload {name}: {error!r} is missing or wrong") from error
    if not load.phases or min(load.contexts, default=0) < 1 or load.output_tokens < 1:
        raise ValueError(f"workload {name}: phases, contexts and output_tokens must be above 0")
    if min(phase.steps for phase in load.phases) < 1:
        raise ValueError(f"workload {name}: a phase needs a step")
    return load


def share_of_gpu(load: Load, gpus: int) -> Load:
    """Return what one of ``gpus`` GPUs sees of a load.

    Raises:
        ValueError: a phase has fewer requests than GPUs; the idle ones are not simulated.

    """
    phases = []
    for phase in load.phases:
        if 0 < phase.concurrency < gpus:
            raise ValueError(
                f"a concurrency of {phase.concurrency} leaves some of {gpus} GPUs idle; "
                "use at least one request for each"
            )
        phases.append(Phase(phase.steps, phase.concurrency // gpus))
    return replace(load, phases=tuple(phases), rate_per_s=load.rate_per_s / gpus)
