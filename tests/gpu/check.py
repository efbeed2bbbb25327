"""Proves and measures the Triton data plane on one GPU, in less than four minutes.

    python tests/gpu/check.py [--json results.json] [--dry-run]

Needs torch, triton and cupy, a checkout, and no vLLM. Every kernel is compared with its
reference, a captured step is replayed, and benchmarks follow. A part that fails, or that
leaves the device unusable, does not keep the others from running; the file is written after
each part. ``--dry-run`` runs all of it at tiny sizes in Triton's interpreter, where its
figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

LIMIT_SECONDS = 225
"""No part runs longer than this after the start."""
PARTS = [
    "check_copies",
    "check_graph",
    "check_attention",
    "check_schedules",
    "check_restoring",
    "gather",
    "resolve_and_retrieve",
    "attention",
]
"""In the order in which they matter, should time run out."""


def run_parts(names: list[str], is_dry: bool) -> None:
    """In a process of its own: print a line of JSON for each part, until one breaks the device."""
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    sys.path.insert(0, str(Path(__file__).parent))
    from setup import use_checkout

    use_checkout()
    import checks
    import figures
    import torch
    from world import REAL, TINY

    device, sizes = ("cpu", TINY) if is_dry else ("cuda", REAL)
    for name in names:
        found: dict[str, Any] = {"part": name, "figures": []}
        begin = monotonic()
        is_broken = False
        try:
            if name in vars(checks):
                vars(checks)[name](sizes, device)
            else:
                found["figures"] += vars(figures)[name](sizes, device)
            checks.synchronize(device)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            try:
                checks.synchronize(device)
                if device == "cuda":
                    torch.ones(1, device=device).sum().item()
            except Exception:
                is_broken = True  # an illegal access spoils everything that follows
        found["seconds"] = round(monotonic() - begin, 1)
        print(json.dumps(found), flush=True)
        if is_broken:
            return


def versions(is_dry: bool) -> dict[str, str]:
    """What the figures were measured with."""
    sys.path.insert(0, str(Path(__file__).parent))
    from setup import use_checkout

    use_checkout()
    import torch
    import triton

    import vllm_dhisparse

    return {
        "chip": "interpreter" if is_dry else torch.cuda.get_device_name(),
        "vllm-dhisparse": vllm_dhisparse.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


def results_of(names: list[str], is_dry: bool, seconds: float) -> list[dict[str, Any]]:
    """Run parts in another process until it ends; return what it said."""
    command = [sys.executable, __file__, "--parts", *names, *(["--dry-run"] if is_dry else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"part"')]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--dry-run", action="store_true", help="tiny, without a GPU")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to run")
    options = parser.parse_args()
    if options.parts is not None:
        run_parts(options.parts, options.dry_run)
        return 0
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device; --dry-run needs none")
    start = monotonic()
    limit = 3600 if options.dry_run else LIMIT_SECONDS
    result: dict[str, Any] = {**versions(options.dry_run), "parts": {}, "figures": []}
    left = list(options.only)
    while left:
        found = results_of(left, options.dry_run, max(1.0, limit - (monotonic() - start)))
        if len(found) < len(left) and not any("error" in part for part in found[-1:]):
            why = "no time left" if monotonic() - start >= limit else "its process died"
            found.append({"part": left[len(found)], "error": why, "figures": []})
        for part in found:
            result["parts"][part["part"]] = part.get("error", "ok")
            result["figures"] += part["figures"]
            print(f"{part.get('seconds', '-'):>6} s  {part['part']}: {part.get('error', 'ok')}")
            for figure in part["figures"]:
                print(f"          {figure}")
        left = left[len(found) :]
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(state != "ok" for state in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
