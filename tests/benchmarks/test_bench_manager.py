from .bench_manager import run


def test_benchmark_runs_at_a_small_size():
    results = run(num_requests=2, context_tokens=500, num_steps=2)
    assert {"name", "value", "unit", "baseline", "ratio"} == set(results[0])
    assert all(entry["value"] > 0 for entry in results)
