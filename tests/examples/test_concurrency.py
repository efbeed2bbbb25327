"""The concurrency program: a small run, and its report by hand-made figures."""

import json

import concurrency
import pytest
from concurrency import Result, draw, main, table, verdict


def found(together, per_second, digest="a"):
    return Result(together, together / 2, per_second, 2 * per_second, 0, 1000, 20.5, digest)


RESULTS = {"resident": found(3, 20.0), "adaptive": found(16, 50.0)}


def test_the_same_memory_serves_several_times_the_requests(tmp_path):
    target = tmp_path / "figures.json"
    load = {"requests": 8, "prompt_tokens": 1536, "output_tokens": 40, "pool_mib": 46}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in load.items()]
    main(["--model", str(tmp_path / "model"), "--json", str(target), *options])
    figures = json.loads(target.read_text())
    assert figures["load"].items() >= load.items()
    resident, adaptive = (Result(**figures[name]) for name in ("resident", "adaptive"))
    assert adaptive.outputs_sha256 == resident.outputs_sha256
    assert adaptive.concurrency >= 4 * resident.concurrency > 0
    assert adaptive.preemptions == 0
    assert adaptive.steps < resident.steps


def test_a_result_counts_the_steps_in_which_all_requests_got_a_token():
    steps = [(0, 9.0), (1, 0.5), (2, 1.0), (2, 3.0)]
    result = concurrency.result([[1, 2, 3], [4, 5]], steps, [1, 2, 2], preemptions=4)
    assert (result.concurrency, result.mean_concurrency) == (2, 1.7)
    assert result.output_tokens_per_s == round(5 / 13.5, 1)
    assert result.full_tokens_per_s == 1.0
    assert (result.preemptions, result.steps, result.seconds) == (4, 4, 13.5)


def test_the_report_compares_adaptive_with_resident(tmp_path):
    lines = table(RESULTS).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")][:3] == ["adaptive", "16", "8.0"]
    assert verdict(RESULTS).splitlines() == [
        "concurrency: 5.33 x resident's",
        "mean concurrency: 5.33 x resident's",
        "output tokens/s: 2.50 x resident's",
        "output tokens/s of full steps: 2.50 x resident's",
        "output tokens identical: yes",
    ]
    assert verdict(RESULTS | {"adaptive": found(16, 50.0, "b")}).endswith("NO")
    pytest.importorskip("matplotlib")
    draw(RESULTS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_differing_tokens_and_engines_that_fail_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency, "write_model", lambda *_: None)
    with pytest.raises(SystemExit, match="residency resident stopped with"):
        main(["--model", str(tmp_path / "none")])
    results = RESULTS | {"adaptive": found(16, 50.0, "b")}
    monkeypatch.setattr(concurrency, "compare", lambda *_: results)
    with pytest.raises(SystemExit, match="output tokens differ"):
        main(["--model", str(tmp_path)])


def test_wrong_options_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(SystemExit):
        main(["--json", str(tmp_path / "none" / "figures.json")])
