"""A load step, row by row: memory follows the load, and comes back.

Low is 4 requests of 100K tokens on a GPU, high is 44. The device holds 7 whole.
"""

from itertools import pairwise

import pytest

from vllm_dhisparse.simulator.geometry import model_named
from vllm_dhisparse.simulator.loads import Load, Phase
from vllm_dhisparse.simulator.profiles import profile_named
from vllm_dhisparse.simulator.run import Settings, build
from vllm_dhisparse.simulator.summary import summarize

LOW, HIGH, AGAIN = Phase(450, 4), Phase(200, 44), Phase(400, 4)


@pytest.fixture(scope="module")
def steps():
    def run(policy):
        load = Load((LOW, HIGH, AGAIN), (100_000,), output_tokens=1200)
        settings = Settings(
            profile_named("h200-pcie"), model_named("glm-5.3-4bit"), load, policy, fidelity="rows"
        )
        return list(build(settings).run())

    return {policy: run(policy) for policy in ("fixed", "adaptive")}


def fetch_ratio(steps, first, end):
    return summarize(steps[first:end], 1.0).fetch_ratio


def test_fixed_fetches_as_much_at_every_load(steps):
    ends = (0, 450, 650, 1050)
    for first, end in pairwise(ends):
        ratio = fetch_ratio(steps["fixed"], max(first, 100), end)
        print(f"\nfixed, steps {first} to {end}: {ratio:.1%}", end="")
        assert 0.12 <= ratio <= 0.165


def test_adaptive_fetches_little_while_memory_is_spare_and_soon_again_after_pressure(steps):
    adaptive = steps["adaptive"]
    low, high = fetch_ratio(adaptive, 300, 450), fetch_ratio(adaptive, 500, 650)
    again = fetch_ratio(adaptive, 950, 1050)
    print(f"\nadaptive: low {low:.2%}, high {high:.1%}, 300 steps after the drop {again:.2%}")
    assert low <= 0.016
    assert again <= 0.016
    assert high > 2 * low
    assert high < fetch_ratio(steps["fixed"], 500, 650)


def test_pressure_is_served_in_its_step(steps):
    before, at = steps["adaptive"][449], steps["adaptive"][450]
    assert at.running == steps["fixed"][450].running, "optional rows kept a request out"
    assert before.levels.optional > at.levels.optional
    assert max(step.preempted for step in steps["adaptive"]) == 0
