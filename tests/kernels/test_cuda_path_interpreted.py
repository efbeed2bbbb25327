"""The CUDA integration over Triton's kernels, interpreted in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
def test_the_cuda_path_runs_on_the_triton_plane():
    schedules = "short_schedule and (Hopper or bfloat16 or decoded)"
    tests = f"({schedules}) or padding_alone or reads_wrongly or graph_can_hold"
    files = ["tests/integration/test_cuda_path.py", "tests/integration/test_cuda_graphs.py"]
    environment = {"TRITON_INTERPRET": "1", "CUDA_PATH_PLANE": "triton", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", tests, "--timeout", "600", *files],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
