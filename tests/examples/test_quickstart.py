"""The newcomer's first command, as a newcomer runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupts import heed_interrupts

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quickstart.sh"


def start(*options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *options],
        env=environment | {"VENV": sys.prefix},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def servers():
    """Command lines of processes that serve the quickstart's model."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if "vllm serve .cache/quickstart" in line]


def test_it_serves_reports_and_stops(tmp_path):
    target = tmp_path / "report.json"
    process = start("--requests", "2", "--json", str(target))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    report = json.loads(target.read_text())
    # 2 leaders, 63 tokens fed back per request, top 64 of a long context
    assert report["selected_rows"] == 2 * 2 * 63 * 64
    assert report["output_tokens"] == 2 * 64
    assert report["residency"] == "fixed"
    assert 0 < report["fetched_rows"] < report["selected_rows"]
    assert report["fetch_ratio"] == round(report["fetched_rows"] / report["selected_rows"], 4)
    assert report["output_tokens_per_s"] > 0
    assert set(report) == {
        "residency",
        "requests",
        "output_tokens",
        "output_tokens_per_s",
        "selected_rows",
        "fetched_rows",
        "fetch_ratio",
        "preemptions",
        "outputs_sha256",
    }
    assert "rows fetched from host memory; fetch ratio" in output
    assert not servers()


def test_it_speculates(tmp_path):
    target = tmp_path / "report.json"
    process = start("--requests", "2", "--json", str(target), "--speculate", "dspark")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    report = json.loads(target.read_text())
    assert report["output_tokens"] == 2 * 64
    assert report["proposed_drafts"] >= report["accepted_drafts"] > report["proposed_drafts"] / 4
    assert report["sharing_gain"] > 1
    assert "staging_acquires_total {'phase': 'verify'}" in output
    log = (ROOT / ".cache" / "quickstart" / "server.log").read_text()
    assert "runs on this machine in Triton's interpreter" in log
    assert not servers()


def test_it_stops_cleanly_when_interrupted():
    process = start("--requests", "2")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[3/4]"):
            break
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not servers()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prot", "1"], "unknown option --prot"),
        (["--port"], "--port needs a value"),
        (["--requests", "none"], "--requests needs a positive number"),
        (["--speculate", "all"], "--speculate must be dspark or dflash2"),
        (["--residency", "all"], "--residency must be adaptive, fixed or resident"),
        (["--port", "80000"], "port 80000 cannot be used"),
    ],
)
def test_bad_options(options, message):
    process = start(*options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in output
