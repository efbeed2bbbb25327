"""The script for a GPU: all of it where there is one, its logic where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("check.py")
BROKEN = """
import builtins, os, sys
original = builtins.__import__

def broken(name, *rest, **options):
    module = original(name, *rest, **options)
    if name == "checks" and "--parts" in sys.argv:
        def wrong(*_):
            raise AssertionError("rows differ")
        module.check_restoring = wrong
        module.check_attention = lambda *_: os._exit(9)
    return module

builtins.__import__ = broken
"""
NAMES = {"gather", "resolve", "retrieve", "sparse"}


def run(*options, code=0, **environment):
    done = subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(900)
def test_the_script_runs_in_the_interpreter(tmp_path):
    run("--dry-run", "--json", tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["chip"] == "interpreter"
    assert set(written["parts"].values()) == {"ok"}
    assert {figure["name"].split()[0] for figure in written["figures"]} == NAMES


@pytest.mark.timeout(300)
def test_a_part_that_fails_or_dies_leaves_the_others(tmp_path):
    """A start-up file of Python's breaks two parts, one of them with its process."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    parts = ["check_restoring", "check_attention", "gather"]
    file = tmp_path / "figures.json"
    run("--dry-run", "--json", file, "--only", *parts, code=1, PYTHONPATH=str(tmp_path))
    assert json.loads(file.read_text())["parts"] == {
        "check_restoring": "AssertionError: rows differ",
        "check_attention": "its process died",
        "gather": "ok",
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_kernel_on_the_gpu(tmp_path):
    run("--json", tmp_path / "figures.json")
