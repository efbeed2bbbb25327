"""Every kernel compiles for every chip, as the command says; see its text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).with_name("compile_ahead.py")
CHIPS = ["sm_80", "sm_90", "sm_100", "gfx942"]
LAUNCHERS = Path(__file__).parents[2] / "vllm_dhisparse/runtime/triton"
KERNELS = Path(__file__).parents[2] / "triton_kernels"


@pytest.mark.timeout(1200)
def test_every_shipped_kernel_compiles_without_spills():
    done = subprocess.run([sys.executable, COMMAND], capture_output=True, text=True)
    report = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in report if " ok " not in line)
    for chip in CHIPS:
        compiled = {line.split()[-1].split("(")[0] for line in report if chip in line}
        assert compiled == launched_kernels(), chip


def launched_kernels():
    """Names of kernels that the data plane launches somewhere."""
    source = "".join(file.read_text() for file in LAUNCHERS.glob("*.py"))
    kernels = "".join(file.read_text() for file in KERNELS.glob("*.py"))
    names = set(re.findall(r"@triton\.jit\b.*\ndef (\w+)", kernels))
    return {name for name in names if re.search(rf"\b{name}\[", source)}
