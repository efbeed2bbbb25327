"""Proves and measures the Triton data plane on one GPU, in less than four minutes.

    python tests/gpu/check.py [--json results.json] [--dry-run]

Needs torch, triton and cupy, a checkout, and no vLLM. Every kernel is compared with its
reference, a captured graph is replayed, and benchmarks follow. ``--dry-run`` runs all of it
at tiny sizes in Triton's interpreter, where its figures mean nothing.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from time import monotonic

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
sys.path.insert(0, str(Path(__file__).parent))

from setup import use_checkout

use_checkout()

import torch  # noqa: E402
import triton  # noqa: E402
from checks import CHECKS  # noqa: E402
from figures import BENCHMARKS  # noqa: E402
from world import REAL, TINY  # noqa: E402

import vllm_dhisparse  # noqa: E402


def versions(is_dry: bool) -> dict[str, str]:
    """What the figures were measured with."""
    return {
        "chip": "interpreter" if is_dry else torch.cuda.get_device_name(),
        "vllm-dhisparse": vllm_dhisparse.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--dry-run", action="store_true", help="tiny, without a GPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run needs none")
    device, sizes = ("cpu", TINY) if options.dry_run else ("cuda", REAL)
    start = monotonic()
    for check in CHECKS:
        check(sizes, device)
        print(f"{monotonic() - start:6.1f} s  {check.__name__}: as the reference", flush=True)
    figures = []
    for benchmark in BENCHMARKS:
        for figure in benchmark(sizes, device):
            figures.append(figure)
            print(f"{monotonic() - start:6.1f} s  {figure}", flush=True)
    if options.json:
        result = {**versions(options.dry_run), "figures": figures}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
