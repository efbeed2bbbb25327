"""The script for a GPU: all of it where there is one, its logic where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("check.py")
NAMES = {"gather", "resolve", "retrieve", "sparse"}


def run(*options):
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(900)
def test_the_script_runs_in_the_interpreter(tmp_path):
    run("--dry-run", "--json", tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["chip"] == "interpreter"
    assert {figure["name"].split()[0] for figure in written["figures"]} == NAMES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_kernel_on_the_gpu(tmp_path):
    run("--json", tmp_path / "figures.json")
