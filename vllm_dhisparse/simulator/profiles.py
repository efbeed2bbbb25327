"""Machines as TOML files, where every number says what it is worth."""

from importlib.resources import files
from pathlib import Path
from tomllib import TOMLDecodeError, loads
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["measured", "published", "assumed", "fitted"]
"""``fitted``: chosen so that published ratios come out; a free parameter, not knowledge."""


class Figure(NamedTuple):
    """A number of a profile with where it is from."""

    value: float
    kind: Kind
    source: str


NAMES = {
    "gpus": "GPUs that share the experts; requests are spread over them",
    "memory_gb": "device memory of one GPU",
    "memory_utilization": "share of it that the engine may use",
    "reserve_gb": "activations, graphs, and what else is neither weights nor KV",
    "bandwidth_gb_s": "of device memory",
    "fp8_tflops": "dense peak",
    "bf16_tflops": "dense peak",
    "link_gb_s": "rows gathered from host memory",
    "host_gb": "host memory for history, of one GPU",
    "weight_efficiency": "share of the bandwidth that reading weights reaches",
    "compute_efficiency": "share of fp8_tflops that linear layers reach",
    "attention_efficiency": "share of bf16_tflops that sparse attention reaches",
    "attention_bandwidth_efficiency": "share of the bandwidth that sparse attention reaches",
    "attention_reuse": "share of the selected rows that attention reads from device memory",
    "indexer_efficiency": "share of fp8_tflops that scoring reaches",
    "indexer_bandwidth_efficiency": "share of the bandwidth that scoring reaches",
    "all_to_all_us": "latency of one exchange of experts' inputs and outputs",
    "all_to_all_gb_s": "its bandwidth",
    "overhead_ms": "of a step, whatever the batch",
    "kernel_factor": "attention, indexer and exchange, over what the efficiencies say",
    "resolve_us": "of one index group's lookup, where history lives on the host",
    "hidden_share": "part of the fetch time behind which other work runs",
    "draft_ms": "of proposing drafts in a step",
}


class Profile:
    """A machine.

    Args:
        name: for people.
        note: what it is, in a line.
        figures: by the names of ``NAMES``.

    Raises:
        ValueError: a name is missing, unknown, or has no kind or source.

    """

    def __init__(self, name: str, note: str, figures: dict[str, Figure]) -> None:
        missing, unknown = NAMES.keys() - figures.keys(), figures.keys() - NAMES.keys()
        if missing or unknown:
            wrong = [f"no {name}" for name in sorted(missing)]
            wrong += [f"unknown {name}" for name in sorted(unknown)]
            raise ValueError(f"profile {name}: {', '.join(wrong)}")
        self.name = name
        self.note = note
        self.figures = figures

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def replaced(self, **values: float) -> "Profile":
        """Return the profile with other values; they count as assumed."""
        changed = {
            name: Figure(value, "assumed", "given for this run") for name, value in values.items()
        }
        return Profile(self.name, self.note, {**self.figures, **changed})

    def of_kind(self, kind: Kind) -> list[str]:
        """Return the names of all figures of a kind."""
        return [name for name, figure in self.figures.items() if figure.kind == kind]


def profile_named(text: str) -> Profile:
    """Return a profile of the package, or one from a file that ends in ``.toml``.

    Raises:
        ValueError: there is none, or it is not a profile; the message says why.

    """
    if text.endswith(".toml"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"there is no profile {text}")
        return parse_profile(path.stem, path.read_text())
    folder = files("vllm_dhisparse.simulator") / "data" / "profiles"
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())
    if text not in known:
        raise ValueError(f"unknown profile {text!r}; known: {', '.join(known)}, or a .toml file")
    return parse_profile(text, (folder / f"{text}.toml").read_text())


def parse_profile(name: str, text: str) -> Profile:
    """Read a profile: ``note``, and a table ``value, kind, source`` for each figure.

    Raises:
        ValueError: the text is not a profile.

    """
    try:
        document: dict[str, Any] = loads(text)
    except TOMLDecodeError as error:
        raise ValueError(f"profile {name} is not TOML: {error}") from error
    note = document.pop("note", "")
    figures = {}
    for key, entry in document.items():
        if not isinstance(entry, dict) or set(entry) != {"value", "kind", "source"}:
            raise ValueError(f"profile {name}: {key} needs exactly value, kind and source")
        if entry["kind"] not in get_args(Kind) or not str(entry["source"]).strip():
            kinds = ", ".join(get_args(Kind))
            raise ValueError(f"profile {name}: {key} needs a source, and a kind of {kinds}")
        figures[key] = Figure(float(entry["value"]), entry["kind"], str(entry["source"]))
    return Profile(name, note, figures)
