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
from quickstart import choose_port

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


def servers(port):
    """Command lines of processes that serve on a port."""
    lines = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if f"--port {port} " in line]


def run(tmp_path, *options, timeout):
    """The report and what was printed."""
    target, port = tmp_path / "report.json", choose_port()
    process = start("--port", str(port), "--json", str(target), *options)
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    assert not servers(port)
    return json.loads(target.read_text()), output


def test_it_serves_reports_and_stops(tmp_path):
    report, output = run(tmp_path, "--requests", "2", timeout=300)
    # 2 leaders, 63 tokens fed back per request, top 64 of a long context
    assert report["selected_rows"] == 2 * 2 * 63 * 64
    assert report["output_tokens"] == 2 * 64
    assert report["right_answers"] == report["requests"] == 2
    assert report["residency"] == "adaptive"
    assert 0 < report["fetched_rows"] < report["selected_rows"]
    assert report["fetch_ratio"] == round(report["fetched_rows"] / report["selected_rows"], 4)
    assert report["output_tokens_per_s"] > 0
    assert set(report) == {
        "residency",
        "requests",
        "right_answers",
        "output_tokens",
        "output_tokens_per_s",
        "selected_rows",
        "fetched_rows",
        "fetch_ratio",
        "preemptions",
        "outputs_sha256",
    }
    assert "2 of 2 answers right" in output
    assert "rows fetched from host memory; fetch ratio" in output


def test_it_speculates(tmp_path):
    report, output = run(tmp_path, "--requests", "1", "--speculate", "dspark", timeout=500)
    assert report["right_answers"] == 1
    assert report["output_tokens"] == 64
    assert report["fetched_rows"] > 0
    shares = report["acceptance_by_position"]
    assert len(shares) == 7
    assert shares == sorted(shares, reverse=True)
    assert report["tokens_per_step"] == pytest.approx(1 + sum(shares), abs=0.02)
    assert report["tokens_per_step"] > 1.2
    assert report["sharing_gain"] > 1
    assert "staging_acquires_total {'phase': 'verify'}" in output
    log = (ROOT / ".cache" / "quickstart" / "server.log").read_text()
    assert "runs on this machine in Triton's interpreter" in log


def test_it_stops_the_server_when_nobody_reads_on():
    port = choose_port()
    process = start("--requests", "2", "--port", str(port))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[2/3]"):
            break
    process.stdout.close()
    process.wait(timeout=120)
    assert process.returncode != 0
    assert not servers(port)


def test_it_stops_cleanly_when_interrupted():
    port = choose_port()
    process = start("--requests", "2", "--port", str(port))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[2/3]"):
            break
    time.sleep(3)
    assert servers(port)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not servers(port)


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
