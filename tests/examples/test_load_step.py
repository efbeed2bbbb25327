"""The load step program without a server, but for one that fails to start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import figure_files
import load_step
import pytest
from interrupts import heed_interrupts
from load_step_report import PHASES, Phase, Result, bars, draw, table, verdict

SCRIPT = Path(__file__).parents[2] / "examples" / "load_step.py"


def result(low, high, low_again, digest="a"):
    phases = (Phase(ratio, 2, 10.5, 0, 1 << 20) for ratio in (low, high, low_again))
    return Result(tuple(phases), digest)


RESULTS = {"fixed": result(0.2, 0.25, 0.2), "adaptive": result(0.001, 0.1, 0.002)}


def test_the_environment_does_not_change_the_memory_of_a_server(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "VLLM_CPU_KVCACHE_SPACE" not in load_step.server_environment()


def test_the_table_has_a_line_for_each_phase():
    lines = table(RESULTS).splitlines()
    assert len(lines) == 1 + 2 * 3
    assert [cell.strip() for cell in lines[5].split("|")] == [
        *("adaptive", "high", "0.1", "2", "10.5", "0", "1,048,576")
    ]
    assert len({len(line) for line in lines}) == 1


def test_bars_are_as_long_as_their_ratio():
    lines = bars(RESULTS, width=50).splitlines()[1:]
    assert [line.count("#") for line in lines] == [40, 0, 50, 20, 40, 0]
    assert "#" not in bars({"resident": result(0.0, 0.0, 0.0)})


def test_the_verdict_compares_adaptive_with_fixed():
    assert verdict(RESULTS).splitlines() == [
        "output tokens identical in all residencies: yes",
        "fetch ratio of adaptive in low: 0.001, 0.5% of fixed's 0.2",
        "fetch ratio of adaptive in low_again: 0.002, 1.0% of fixed's 0.2",
    ]
    assert "residencies: NO" in verdict({**RESULTS, "resident": result(0.0, 0.0, 0.0, "b")})
    assert verdict({"adaptive": RESULTS["adaptive"]}) == ""


def test_the_json_has_every_phase_by_name():
    document = json.loads(json.dumps(RESULTS["fixed"].to_json()))
    assert set(document) == {*PHASES, "outputs_sha256"}
    assert set(document["low"]) == {
        *("fetch_ratio", "concurrency", "output_tokens_per_s", "preemptions", "optional_bytes")
    }


def test_prompts_differ_and_have_no_special_tokens():
    texts = [load_step.prompt(number, 200) for number in range(18)]
    assert len({tuple(text[:64]) for text in texts}) == 18
    assert all(16 <= token < 496 for text in texts for token in text)


def test_the_figure_is_an_image(tmp_path):
    draw(RESULTS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_matplotlib_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(figure_files, "has_matplotlib", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        load_step.parse(["--figure", "figure.png"])
    assert "--figure needs matplotlib, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--residency", "all"], "invalid choice: 'all'"),
        (["--json", "no/such/folder/a.json"], "no folder for no/such/folder/a.json"),
        (["--jsn", "a.json"], "unrecognized arguments: --jsn a.json"),
    ],
)
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        load_step.parse(options)
    assert message in capsys.readouterr().err


def start(folder, server):
    """The program with a shell script in place of vLLM."""
    vllm = folder / "vllm"
    vllm.write_text(f"#!/bin/sh\n{server}\n")
    vllm.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--model", folder / "model", "--residency", "fixed"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path):
    process = start(tmp_path, "echo starting\necho out of luck\nexit 3")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: residency fixed: the server stopped with status 3" in errors
    assert errors.endswith("starting\nout of luck\n")


def test_an_interrupt_stops_the_server_and_its_children(tmp_path):
    started = tmp_path / "started"
    process = start(tmp_path, f"sleep 600 &\necho $! > {started}\nwait")
    while not (started.exists() and started.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    child = subprocess.run(
        ["ps", "-o", "stat=", "-p", started.read_text().strip()], text=True, capture_output=True
    ).stdout
    assert not child or child.startswith("Z"), "a process stays"
