"""Invariants of every run: the books balance in each step, whatever the policy."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.simulator.geometry import model_named
from vllm_dhisparse.simulator.loads import Load, Phase
from vllm_dhisparse.simulator.memory import POLICIES
from vllm_dhisparse.simulator.profiles import profile_named
from vllm_dhisparse.simulator.run import Settings, build
from vllm_dhisparse.simulator.speculation import SPECULATIONS

PROFILE, MODEL = profile_named("h200-pcie"), model_named("glm-5.3-4bit")
PHASES = (Phase(40, 3), Phase(60, 40), Phase(60, 2))


def engine(policy, drafter="none", **changes):
    load = Load(PHASES, (100_000,), output_tokens=50, imported=changes.pop("imported", True))
    settings = Settings(
        PROFILE,
        MODEL,
        load,
        policy,
        SPECULATIONS[drafter],
        fidelity="rows",
        kv_gb=20.0,
        checks=True,
        **changes,
    )
    return build(settings)


@pytest.mark.parametrize("drafter", ["none", "dflash2"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_balance_in_every_step(policy, drafter):
    """`checks` asserts budget, one use of every block, one owner of every page, rings of one
    size, each missing row fetched once, and that the maps of rows and slots agree."""
    run = engine(policy, drafter)
    steps = list(run.run())
    assert len(steps) == 160
    assert sum(step.tokens for step in steps) > 400
    assert len(run.finished) >= 8
    for step in steps:
        assert sum(step.levels) == run.memory.sizes.num_blocks
        assert step.levels.ring == step.running * run.memory.sizes.ring_blocks
        rows = step.queries * MODEL.scaled(160).top_k
        assert step.selected.sum() <= rows
        assert step.fetched <= step.selected[UnitState.DEAD]
    for request in list(run.running):
        run.memory.end(request.id)
    run.memory.bind()
    run.memory.check_integrity()
    levels = run.memory.levels()
    assert levels.optional + levels.free == run.memory.sizes.num_blocks, "a block did not return"
    assert run.memory.pages.num_free == run.memory.sizes.num_pages, "a page did not return"


@pytest.mark.parametrize("drafter", ["none", "dflash2"])
def test_accepted_tokens_do_not_depend_on_the_policy(drafter):
    found = {}
    for policy in POLICIES:
        run = engine(policy, drafter)
        list(run.run())
        found[policy] = {r.arrival.number: sum(r.accepted) for r in run.finished}
        assert set(found[policy].values()) == {50}
        if drafter == "none" or policy != "adaptive":  # adaptive may shorten drafts
            by_step = {r.arrival.number: r.accepted for r in run.finished}
            first = found.setdefault("steps", by_step)
            shared = first.keys() & by_step.keys()
            assert len(shared) > 5
            assert all(first[number] == by_step[number] for number in shared)


def test_a_run_is_the_same_again():
    def figures():
        steps = list(engine("adaptive", "dflash2").run())
        return [(s.start_s, s.tokens, s.fetched, s.levels, s.selected.tolist()) for s in steps]

    assert figures() == figures()


def test_resident_fetches_nothing_and_others_do():
    fetched = {p: sum(s.fetched for s in engine(p).run()) for p in ("resident", "fixed")}
    assert fetched["resident"] == 0
    assert fetched["fixed"] > 1000


def test_pressure_takes_optional_units_in_the_step_that_needs_them():
    steps = list(engine("adaptive").run())
    arriving = next(step for step in steps if step.phase == 1)
    assert arriving.running + arriving.waiting == 40
    assert steps[39].levels.optional > 300
    assert arriving.levels.optional < steps[39].levels.optional
    fixed = next(step for step in engine("fixed").run() if step.phase == 1)
    assert arriving.running >= fixed.running, "optional rows kept a request out"
    states = {step.state for step in steps}
    assert "grow" in states
    assert states & {"shrink", "reclaim"}


def test_drafts_get_shorter_where_memory_is_short():
    load = Load((Phase(60, 40),), (100_000,), output_tokens=300)
    settings = Settings(PROFILE, MODEL, load, "adaptive", SPECULATIONS["dflash2"], kv_gb=12.0)
    for policy, least in (("adaptive", 1), ("fixed", 8)):
        steps = list(build(replace(settings, policy=policy, fluid_top_k=160)).run())
        queries = {step.queries / step.running for step in steps}
        assert (min(queries), max(queries)) == (least, 8), policy


def test_prompts_computed_here_leave_their_newest_rows():
    imported = list(engine("page_tail").run())[:40]
    computed = list(engine("page_tail", imported=False).run())[:40]

    def missed(steps):
        selected = np.sum([step.selected for step in steps], axis=0)
        return selected[UnitState.DEAD] / selected.sum()

    assert missed(computed) < 0.5 * missed(imported)


def test_a_request_that_never_fits_is_an_error():
    load = Load((Phase(1, 1),), (100_000,), 10)
    settings = Settings(PROFILE, MODEL, load, "resident", fidelity="rows", kv_gb=4.0)
    with pytest.raises(ValueError, match=r"of 10\d{4} tokens .* blocks; the device has"):
        next(build(settings).run())
    small = replace(settings, profile=PROFILE.replaced(host_gb=3.0), policy="adaptive", kv_gb=9.0)
    with pytest.raises(ValueError, match="does not fit in host memory"):
        next(build(small).run())
