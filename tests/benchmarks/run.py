"""Run the benchmarks: print their figures, and write them with the machine's description."""

import argparse
import json
import platform
from pathlib import Path

import data_plane  # noqa: F401 - registers its benchmarks
import numba
import torch
from harness import BENCHMARKS


def machine() -> dict[str, str | int]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(models),
        "threads_used": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--only", help="run the benchmarks whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for name, benchmark in BENCHMARKS.items():
        if arguments.only and arguments.only not in name:
            continue
        for figure in benchmark():
            figures.append(figure._asdict())
            print(figure, flush=True)
    if arguments.json:
        content = {"machine": machine(), "figures": figures}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
