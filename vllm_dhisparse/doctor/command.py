"""``vllm-dhisparse doctor``: what may keep DHISPARSE from working here, with the fix."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from vllm_dhisparse import __version__
from vllm_dhisparse.doctor.compiled import check_cupy, check_data_plane, check_imports, run_imports
from vllm_dhisparse.doctor.distributions import check_distributions
from vllm_dhisparse.doctor.engine import CHECK, check_engine
from vllm_dhisparse.doctor.finding import Finding, error
from vllm_dhisparse.doctor.memory import check_memory
from vllm_dhisparse.doctor.programs import ProgramError
from vllm_dhisparse.options import size


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; its exit status is 1 where an error was found, else 0."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this environment",
        description="Checks this environment; takes about a minute. Exit status 1: an error "
        "was found. Warnings do not change it.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--host-pool-gib", type=size, metavar="N", help="compare this pool with the memory"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    findings = []
    for finding in check_all(options.host_pool_gib):
        findings.append(finding)
        if not options.json:
            print(_lines(finding), flush=True)
    errors = sum(finding.status == "error" for finding in findings)
    if options.json:
        document: dict[str, Any] = {"version": __version__, "errors": errors}
        document["checks"] = [finding._asdict() for finding in findings]
        print(json.dumps(document, indent=2))
    else:
        warnings = sum(finding.status == "warning" for finding in findings)
        print(f"\n{errors} errors, {warnings} warnings")
    return 1 if errors else 0


def check_all(host_pool_gib: float | None) -> Iterator[Finding]:
    """Yield all findings; vLLM is started last, and only where nothing else is wrong."""
    has_error = False
    for finding in _outside(host_pool_gib):
        has_error = has_error or finding.status == "error"
        yield finding
    if has_error:
        yield Finding(CHECK, "skipped", "other errors come first")
    else:
        yield check_engine()


def _outside(host_pool_gib: float | None) -> Iterator[Finding]:
    yield from check_distributions()
    cuda = None
    try:
        found = run_imports()
    except ProgramError as failure:
        yield error("compiled packages", str(failure), "install torch and numba again")
    else:
        yield from check_imports(found)
        cuda = found.get("torch", {}).get("cuda")
        yield check_cupy(cuda)
        if all("version" in found.get(name, {}) for name in ("torch", "numba")):
            yield check_data_plane()
    yield from check_memory(host_pool_gib, is_cuda=cuda is not None)


def _lines(finding: Finding) -> str:
    text = f"{finding.status:7}  {finding.check}: {finding.detail}"
    return f"{text}\n         fix: {finding.fix}" if finding.fix else text
