"""What one calibrated profile gives, against published ratios; and signs that need none.

Calibrated to the published ratios, not measured. ``pytest -s`` prints the figures.
"""

from dataclasses import replace
from functools import cache

import pytest
from workloads import TRACES

from vllm_dhisparse.simulator.comparison import Variant, at_equal_latency, steady, sweep
from vllm_dhisparse.simulator.geometry import model_named
from vllm_dhisparse.simulator.loads import Load, Phase
from vllm_dhisparse.simulator.profiles import profile_named
from vllm_dhisparse.simulator.run import Settings
from vllm_dhisparse.simulator.speculation import NONE, SPECULATIONS

DFLASH2, DSPARK = SPECULATIONS["dflash2"], SPECULATIONS["dspark"]
HISPARSE, ADAPTIVE = Variant("fixed", NONE), Variant("adaptive", NONE)
DRAFTS = Variant("adaptive", DFLASH2)
BOUNDS_MS = (15, 17.5, 20, 22.5, 25, 30)


def settings(profile="h200-pcie", model="glm-5.3-4bit", context=100_000, **changes):
    load = Load((Phase(1, 1),), (context,), 1024)
    return replace(Settings(profile_named(profile), model_named(model), load), **changes)


@cache
def glm(variant, concurrency):
    return steady(settings(), variant, concurrency)


def output(variant, concurrency=128):
    return glm(variant, concurrency).output_tokens_per_s


def test_ratios_at_128_requests_are_the_published_ones():
    ratios = {
        "adaptive / HiSparse": (output(ADAPTIVE) / output(HISPARSE), 1.14, 0.06),
        "with DFlash2 / HiSparse": (output(DRAFTS) / output(HISPARSE), 1.45, 0.12),
        "with DFlash2 / adaptive": (output(DRAFTS) / output(ADAPTIVE), 1.27, 0.1),
    }
    for name, (found, published, band) in ratios.items():
        print(f"\n{name}: {found:.3f}, published {published}", end="")
        assert found == pytest.approx(published, abs=band), name


def test_equal_latency_gives_two_to_four_times_the_requests():
    curves = [{n: glm(v, n) for n in (8, 16, 32, 64, 128, 256)} for v in (HISPARSE, DRAFTS)]
    found = at_equal_latency(*curves, BOUNDS_MS)
    for each in found:
        print(f"\n{each.bound_ms} ms: {each.concurrency:g} x, output {each.output:.2f} x", end="")
    assert len(found) == len(BOUNDS_MS)
    assert all(2 <= each.concurrency <= 4 for each in found)
    assert max(each.concurrency for each in found) == 4


def test_a_model_with_small_rows_gains_by_capacity_alone():
    base = settings(model="deepseek-v4.1-flash", context=500_000)
    base = replace(base, profile=base.profile.replaced(gpus=4))
    resident = steady(base, Variant("resident", DSPARK), 512, steps=200)
    adaptive = steady(base, Variant("adaptive", DSPARK), 512, steps=200)
    share = resident.running / (resident.running + resident.waiting)
    ratio = adaptive.output_tokens_per_s / resident.output_tokens_per_s
    print(f"\nresident holds {share:.2f} of 512, adaptive {ratio:.2f} x its output")
    assert share == pytest.approx(0.28, abs=0.03)
    assert ratio == pytest.approx(1.85, abs=0.25)


WORLDS = {
    "ordinary": settings(),
    "scattered": settings(locality="scattered"),
    "copying": settings(traces=(TRACES / "smollm2-copy-argparse.npz",)),
    "C2C": settings(profile="gb200-c2c"),
}


@pytest.mark.parametrize("world", WORLDS)
def test_adaptive_is_never_worse_than_either_baseline(world):
    gains = {}
    for concurrency in (8, 64, 256):
        found = {
            policy: steady(WORLDS[world], Variant(policy, NONE), concurrency, steps=400)
            for policy in ("resident", "fixed", "adaptive")
        }
        best = max(found[p].output_tokens_per_s for p in ("resident", "fixed"))
        gains[concurrency] = found["adaptive"].output_tokens_per_s / best
    print(f"\n{world}:", ", ".join(f"{n} requests {gain:.3f}" for n, gain in gains.items()))
    assert min(gains.values()) >= 0.98


def test_a_host_pool_smaller_than_the_device_is_the_exception():
    """All history has a host page, so no more requests run than host memory holds; resident
    needs none. From the size of the device on, adaptive is ahead again."""
    gains = {}
    for host_gb in (20, 60):
        base = settings()
        base = replace(base, profile=base.profile.replaced(host_gb=host_gb))
        found = {
            policy: steady(base, Variant(policy, NONE), 128, steps=400).output_tokens_per_s
            for policy in ("resident", "fixed", "adaptive")
        }
        gains[host_gb] = found["adaptive"] / max(found["resident"], found["fixed"])
    print(f"\nadaptive over the better baseline: {gains}")
    assert gains[20] < 0.7
    assert gains[60] >= 0.98


def test_a_faster_link_gains_less():
    def gain(profile):
        base = settings(profile=profile, model="glm-5.3-4bit")
        outputs = [
            steady(base, v, 128, steps=400).output_tokens_per_s for v in (ADAPTIVE, HISPARSE)
        ]
        return outputs[0] / outputs[1]

    assert gain("gb200-c2c") < gain("b200-pcie")


def both_fidelities(variant, concurrency):
    found = {}
    for fidelity in ("rows", "fluid"):
        base = settings(fidelity=fidelity, fluid_top_k=160)
        found[fidelity] = steady(base, variant, concurrency, steps=600)
    rows, fluid = found["rows"], found["fluid"]
    print(f"\n{variant.policy}, {concurrency}: {rows.fetch_ratio:.2%} {fluid.fetch_ratio:.2%}")
    return rows, fluid


@pytest.mark.parametrize("concurrency", [48, 64, 96, 128, 160, 200])
def test_where_little_is_fetched_curves_say_less_than_rows(concurrency):
    rows, fluid = both_fidelities(ADAPTIVE, concurrency)
    assert rows.fetch_ratio < 0.015
    assert rows.fetch_ratio / 4 <= fluid.fetch_ratio <= rows.fetch_ratio
    assert rows.fetch_ratio - fluid.fetch_ratio < 0.005
    assert fluid.output_tokens_per_s == pytest.approx(rows.output_tokens_per_s, rel=0.01)


def test_rows_and_curves_agree():
    for variant, concurrency in (
        (HISPARSE, 128),
        (HISPARSE, 320),
        (ADAPTIVE, 320),
        (ADAPTIVE, 400),
    ):
        rows, fluid = both_fidelities(variant, concurrency)
        assert fluid.fetch_ratio == pytest.approx(rows.fetch_ratio, rel=0.1)
        assert fluid.output_tokens_per_s == pytest.approx(rows.output_tokens_per_s, rel=0.1)


def test_a_sweep_at_full_size_has_every_concurrency():
    found = sweep(settings(), ADAPTIVE, (8, 128), steps=60)
    assert [round(summary.running * 8) for summary in found.values()] == [8, 128]
