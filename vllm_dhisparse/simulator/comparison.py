"""Throughput of policies over concurrency, and at equal latency."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm_dhisparse.simulator.loads import Load, Phase
from vllm_dhisparse.simulator.memory import PolicyName
from vllm_dhisparse.simulator.run import Settings, build
from vllm_dhisparse.simulator.speculation import Speculation
from vllm_dhisparse.simulator.summary import Summary, summarize


class Variant(NamedTuple):
    """A policy with a drafter."""

    policy: PolicyName
    speculation: Speculation


class Equal(NamedTuple):
    """Most requests in all GPUs within a bound on the mean time of an output token, and ratios.

    ``concurrency``, ``output``: of the second over the first variant.
    """

    bound_ms: float
    first: int
    second: int
    concurrency: float
    output: float


def steady(settings: Settings, variant: Variant, concurrency: int, steps: int = 700) -> Summary:
    """Return the second half of a run with as many requests all the time.

    Args:
        settings: of the machine, model and prompts; contexts and output of its load count.
        variant: what runs.
        concurrency: in all GPUs, a multiple of their number.
        steps: of the run.

    Raises:
        ValueError: the GPUs cannot have as many requests each.

    """
    gpus = int(settings.profile["gpus"])
    if concurrency % gpus:
        raise ValueError(f"a concurrency of {concurrency} is not the same on each of {gpus} GPUs")
    load: Load = replace(settings.load, phases=(Phase(steps, concurrency // gpus),))
    chosen = replace(settings, load=load, policy=variant.policy, speculation=variant.speculation)
    engine = build(chosen)
    done = list(engine.run())
    return summarize(done[steps // 2 :], settings.model.token_bytes * engine.scale)


def sweep(
    settings: Settings, variant: Variant, concurrencies: Sequence[int], steps: int = 700
) -> dict[int, Summary]:
    """Return steady figures at each concurrency."""
    return {number: steady(settings, variant, number, steps) for number in concurrencies}


def at_equal_latency(
    first: Mapping[int, Summary], second: Mapping[int, Summary], bounds_ms: Sequence[float]
) -> list[Equal]:
    """Compare the most requests that each serves within a bound, nobody waiting.

    Bounds that one of them cannot meet are left out.
    """
    found = []
    for bound in bounds_ms:
        most = []
        for curve in (first, second):
            fitting = [n for n, s in curve.items() if s.tpot_ms <= bound and not s.waiting]
            most.append(max(fitting, default=0))
        if min(most):
            a, b = first[most[0]], second[most[1]]
            output = b.output_tokens_per_s / a.output_tokens_per_s
            found.append(Equal(bound, most[0], most[1], most[1] / most[0], output))
    return found
