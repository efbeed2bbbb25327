"""The tests of the data plane with Triton's interpreter, in a process of their own.

The interpreter is chosen when triton is imported, and vLLM must not find it chosen.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["commands copies attend measuring self_check", "resolve", "schedules"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", PARTS)
def test_triton_answers_as_the_reference(part):
    files = [f"tests/runtime/test_{name}.py" for name in part.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "triton", "--timeout", "600", *files],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
