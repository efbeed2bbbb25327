import json
import re

import pytest
from workloads import TRACES

from vllm_dhisparse.cli import main

SHORT = """
contexts = [100000]
output_tokens = 40
phases = [{ steps = 30, concurrency = 16 }, { steps = 30, concurrency = 96 }]
"""


@pytest.fixture
def workload(tmp_path):
    (tmp_path / "short.toml").write_text(SHORT)
    return str(tmp_path / "short.toml")


def test_simulate_writes_all_it_found(workload, tmp_path, capsys):
    out, plot = tmp_path / "run.json", tmp_path / "run.png"
    options = ["--workload", workload, "--spec", "dflash2", "--seed", "3", "--check"]
    assert main(["simulate", *options, "--out", str(out), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if "adaptive" in line]) == 2
    assert "free parameters: weight_efficiency" in text
    document = json.loads(out.read_text())
    assert document["label"] == "simulated, calibrated to published ratios, not measured"
    assert set(document["policies"]) == {"resident", "fixed", "adaptive"}
    low, high = document["policies"]["adaptive"]
    assert (low["steps"], high["steps"]) == (30, 30)
    assert low["running"] == 2
    assert sum(high["device_ratio"].values()) == pytest.approx(1)
    assert document["profile"]["figures"]["link_gb_s"]["kind"] == "published"
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.json"
    assert main(["simulate", *options, "--out", str(again)]) == 0
    assert json.loads(again.read_text())["policies"] == document["policies"]


def test_a_sweep_does_the_steps_of_its_workload_at_every_concurrency(workload, tmp_path, capsys):
    """So what it costs is bounded by design; the seconds of this machine are in its last line."""
    out = tmp_path / "sweep.json"
    options = ["--workload", workload, "--policy", "fixed,adaptive", "--out", str(out)]
    assert main(["simulate", *options, "--concurrency", "8,64,128"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"360 steps, simulated in \d+\.\d s", last), last
    found = json.loads(out.read_text())["policies"]
    assert {name: phase["running"] for name, (phase, _) in found.items()} == {
        f"{policy}, {number}": number / 8
        for policy in ("fixed", "adaptive")
        for number in (8, 64, 128)
    }


def test_simulate_takes_recorded_traces(workload, capsys):
    trace = str(TRACES / "smollm2-novel.npz")
    for fidelity in ("rows", "fluid"):
        options = ["--trace", trace, "--fidelity", fidelity, "--policy", "fixed"]
        assert main(["simulate", "--workload", workload, *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " fixed " in f" {line} "]
    assert len(lines) == 4


def test_simulate_takes_arrivals_from_a_file(tmp_path, capsys):
    (tmp_path / "arrivals.csv").write_text(
        "time_s,context,output_tokens\n0.0,100000,20\n0.2,50000,10\n0.1,100000,20\n"
    )
    text = 'contexts = [100000]\noutput_tokens = 20\nfile = "arrivals.csv"\n'
    (tmp_path / "file.toml").write_text(text + "phases = [{ steps = 40, concurrency = 0 }]\n")
    options = ["--workload", str(tmp_path / "file.toml"), "--policy", "adaptive"]
    assert main(["simulate", *options, "--out", str(tmp_path / "o.json")]) == 0
    found = json.loads((tmp_path / "o.json").read_text())["policies"]["adaptive"][0]
    tokens = found["output_tokens_per_s"] * found["steps"] * sum(found["step_ms"].values()) / 1e3
    assert round(tokens) == 50
    (tmp_path / "arrivals.csv").write_text("time_s,context\n0.0,100000\n")
    assert main(["simulate", *options]) == 2
    assert "line 2: needs the columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "h300"], "unknown profile 'h300'; known: b200-pcie"),
        (["--profile", "none.toml"], "there is no profile none.toml"),
        (["--model", "glm-9"], "unknown model 'glm-9'; known: glm-5.3"),
        (["--workload", "calm"], "unknown workload 'calm'"),
        (["--policy", "adaptive,best"], "unknown policy 'best'"),
        (["--spec", "medusa"], "unknown speculation 'medusa'"),
        (["--spec", "fixed:9,3"], "3 drafts cannot give 9.0 tokens"),
        (["--trace", "novel.npz"], "novel.npz is not a trace"),
        (["--trace", "best"], "unknown locality 'best'"),
        (["--concurrency", "3"], "leaves some of 8 GPUs idle"),
        (["--model", "glm-5.3", "--spec", "dflash2"], "does not fit on 8 GPUs"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(options, message, capsys):
    assert main(["simulate", "--policy", "adaptive", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "0"], "--context: '0' is not a whole number above 0"),
        (["--concurrency", "8,1.5"], "--concurrency: '1.5' is not a whole number"),
        (["--kv-gb", "-1"], "--kv-gb: '-1' is not a number above 0"),
        (["--host-gb", "nan"], "--host-gb: 'nan' is not a number above 0"),
        (["--host-gb", "much"], "'much' is not a number"),
        (["--out", "no-folder/out.json"], "there is no folder 'no-folder'"),
        (["--plot", "."], "'.' is a folder; name a file"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *options])
    assert message in capsys.readouterr().err


def test_plan_says_what_fits(capsys):
    assert main(["plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 16
    assert found["most_resident"] == 7
    assert found["fits"]
    assert 0 < found["fetch_ratio"] < 0.02
    assert main(["plan", "--spec", "dflash2"]) == 0
    assert "draft ring of a request" in capsys.readouterr().out
    assert main(["plan", "--concurrency", "512"]) == 1
    assert "do not fit: host memory holds fewer" in capsys.readouterr().out
    assert main(["plan", "--context", "20000", "--concurrency", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fetch_ratio"] == 0


def test_plan_agrees_with_the_simulation(tmp_path, capsys):
    assert main(["plan", "--concurrency", "256", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    phases = "phases = [{ steps = 400, concurrency = 256 }, { steps = 200, concurrency = 256 }]"
    text = f"contexts = [100000]\noutput_tokens = 1000\n{phases}\n"
    (tmp_path / "steady.toml").write_text(text)
    options = ["--workload", str(tmp_path / "steady.toml"), "--policy", "adaptive"]
    assert main(["simulate", *options, "--out", str(tmp_path / "o.json")]) == 0
    found = json.loads((tmp_path / "o.json").read_text())["policies"]["adaptive"][1]
    assert found["running"] == planned["requests"]
    assert found["fetch_ratio"] == pytest.approx(planned["fetch_ratio"], rel=0.25)
