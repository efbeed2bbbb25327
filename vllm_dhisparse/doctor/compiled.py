"""Compiled packages: torch and its companions, CuPy against torch's CUDA, the data plane."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_dhisparse.doctor.distributions import cupy_distributions
from vllm_dhisparse.doctor.finding import Finding, error, ok, warning
from vllm_dhisparse.doctor.programs import ProgramError, run_json_program, run_program

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_imports(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Judge what ``imports`` found."""
    for name in ("torch", "numba"):
        if name not in found:
            yield error(name, "not installed", f"pip install {name}, or vllm-dhisparse again")
        elif "error" in found[name]:
            yield error(
                name,
                f"cannot be imported: {found[name]['error']}",
                f"install {name} again, in the build for this machine",
            )
        else:
            yield ok(name, found[name]["version"])
    broken = {name: found[name]["error"] for name in COMPANIONS if "error" in found.get(name, {})}
    if broken:
        detail = "; ".join(f"{name}: {why}" for name, why in broken.items())
        yield error(
            "torch companions",
            f"{detail}. vLLM imports them when they are there, and then fails itself",
            f"pip uninstall -y {' '.join(broken)}: vLLM's text models do not need them",
        )
    else:
        there = [f"{name} {found[name]['version']}" for name in COMPANIONS if name in found]
        yield ok("torch companions", ", ".join(there) or "none installed, none needed")


def check_cupy(cuda: str | None) -> Finding:
    """Compare CuPy with the CUDA version that torch was built for, None = CPU build."""
    check = "CuPy"
    installed = cupy_distributions()
    names = ", ".join(f"{name} {version}" for name, version in installed.items())
    if cuda is None:
        return ok(check, f"torch has no CUDA, so it is not used ({names or 'not installed'})")
    extra = f"cuda{cuda.split('.')[0]}"
    install = f"pip install 'vllm-dhisparse[{extra}]'"
    if not installed:
        return error(check, f"torch has CUDA {cuda}, and CuPy is not installed", install)
    if len(installed) > 1:
        return error(
            check,
            f"{names} have written into the same folder",
            f"pip uninstall -y {' '.join(installed)}, then {install}",
        )
    (name,) = installed
    if name != "cupy" and name != f"cupy-{extra}x":
        return error(
            check,
            f"{names} is for another CUDA than torch's {cuda}",
            f"pip uninstall -y {name}, then {install}",
        )
    if name == "cupy":
        return warning(
            check,
            f"{names} was built here; torch has CUDA {cuda}",
            "make sure that it was built for the same CUDA, or use its wheel: " + install,
        )
    return ok(check, f"{names}, torch has CUDA {cuda}")


def check_data_plane() -> Finding:
    """Let the data plane prove itself in a process of its own."""
    check = "kernel self-check"
    try:
        return ok(check, run_program("vllm_dhisparse.runtime.self_check"))
    except ProgramError as failure:
        return error(
            check,
            f"the data plane is wrong here: {failure}",
            "delete the __pycache__ folders of vllm_dhisparse, then install numba and "
            "vllm-dhisparse again",
        )


def run_imports() -> dict[str, Any]:
    """Import the compiled packages in a process of its own."""
    return run_json_program("vllm_dhisparse.doctor.imports")
