"""Run the benchmarks: print their figures, and write them with the machine's description."""

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import bench_load_drop  # noqa: F401 - registers its benchmarks
import bench_manager  # noqa: F401 - registers its benchmarks
import data_plane  # noqa: F401 - registers its benchmarks
import numba
import torch
from harness import BENCHMARKS, FULL, TINY, Figure

from vllm_dhisparse.options import new_file


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


def figures(only: str, tiny: bool) -> Iterator[Figure]:
    for name, benchmark in BENCHMARKS.items():
        if only in name:
            yield from benchmark(TINY if tiny else FULL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="file to write")
    parser.add_argument("--only", default="", help="run the benchmarks whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="run in seconds; figures mean nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    collected = []
    for figure in figures(options.only, options.tiny):
        collected.append(figure._asdict())
        print(figure, flush=True)
    if options.json:
        content = {"machine": machine(), "figures": collected}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
