"""The wrapper of `vllm bench serve` without a server, and the files that go with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench
import pytest
from vllm.benchmarks.sweep.param_sweep import ParameterSweep

FOLDER = Path(__file__).parents[2] / "examples" / "bench"
NAMES = {"model_name": "m", "engine": "0"}


def metrics(factor, residency="adaptive"):
    """A /metrics text whose counters are so many times those of the first."""
    rows = {("host", "decode"): 10, ("host", "verify"): 30, ("tail", "verify"): 60}
    rows |= {("optional", "prefill"): 999, ("host", "prefill"): 5}

    def line(name, value, **labels):
        inside = ",".join(f'{k}="{v}"' for k, v in (NAMES | labels).items())
        return f"{name}{{{inside}}} {value}"

    name = "vllm:dhisparse_"
    lines = [line(f"{name}mode_info", 1, residency=residency)]
    for (tier, phase), amount in rows.items():
        lines.append(line(f"{name}selected_rows_total", factor * amount, tier=tier, phase=phase))
    lines.append(line(f"{name}fetched_rows_total", factor * 20, phase="verify"))
    lines.append(line(f"{name}fetched_rows_total", factor * 7, phase="prefill"))
    lines.append(line(f"{name}transfer_bytes_total", factor * 800, direction="host_to_device"))
    lines.append(line(f"{name}transfer_bytes_total", factor * 9, direction="device_to_host"))
    lines.append(line(f"{name}residency_bytes", factor * 64, residency_class="optional"))
    lines.append(line("vllm:generation_tokens_total", factor * 40))
    lines.append(line("vllm:num_preemptions_total", factor))
    return "\n".join(lines) + "\n"


def test_counters_are_differences_and_levels_are_the_last():
    before, after = bench.parse(metrics(1)), bench.parse(metrics(3))
    found = bench.report(before, after)
    assert found["dhisparse_residency"] == "adaptive"
    assert found["dhisparse_selected_rows"] == 2 * 100
    assert found["dhisparse_fetched_rows"] == 2 * 20
    assert found["dhisparse_fetch_ratio"] == 0.2
    assert found["dhisparse_sharing_gain"] == 2.0
    assert found["dhisparse_host_to_device_bytes_per_token"] == 20
    assert found["dhisparse_preemptions"] == 2
    assert found["dhisparse_optional_bytes"] == 3 * 64
    assert (found["dhisparse_found_tail"], found["dhisparse_found_host"]) == (0.6, 0.4)
    lines = bench.table(found).splitlines()
    assert len(lines) == 1 + len(found)
    assert len({len(line) for line in lines}) == 1


def test_a_run_without_traffic_divides_by_nothing():
    found = bench.report(bench.parse(metrics(2)), bench.parse(metrics(2)))
    assert found["dhisparse_fetch_ratio"] == 0
    assert found["dhisparse_sharing_gain"] == 1


def test_a_server_without_the_package_gives_nothing():
    assert bench.report({}, bench.parse("vllm:generation_tokens_total 5\n")) == {}


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "http://127.0.0.1:8000/metrics"),
        (["--host", "a", "--port=9"], "http://a:9/metrics"),
        (["--base-url", "https://b/", "--port", "9"], "https://b/metrics"),
        (["--port", "1", "--port", "2"], "http://127.0.0.1:2/metrics"),
    ],
)
def test_the_metrics_are_where_the_benchmark_goes(arguments, url):
    assert bench.metrics_url(arguments) == url


def test_a_benchmark_of_nobody_says_so():
    with pytest.raises(SystemExit, match="no metrics at"):
        bench.main(["--port", "9"])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_vllm_reads_the_parameter_files(path):
    for item in ParameterSweep.read_json(path):
        command = item.apply_to_cmd(["vllm", "serve", "m"])
        assert command[3].startswith("--")
        if path.stem == "residencies":
            assert json.loads(command[4])["dhisparse"]["residency"] == item.name


def test_the_sweep_names_what_is_wrong_before_it_starts(tmp_path):
    def run(**settings):
        script = ["bash", str(FOLDER / "sweep.sh")]
        environment = os.environ | settings
        return subprocess.run(script, env=environment, capture_output=True, text=True)

    done = run(LOAD="nothing")
    assert done.returncode == 2
    assert "error: no file examples/bench/nothing.json" in done.stderr
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "pip install pandas" in done.stderr


def test_help_is_ours():
    done = subprocess.run(
        [sys.executable, FOLDER / "bench.py", "--help"], capture_output=True, text=True
    )
    assert "what DHISPARSE did meanwhile" in done.stdout
