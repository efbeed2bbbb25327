"""Residency `adaptive`: the tokens of `resident`, whatever memory does meanwhile."""

import random
from contextlib import suppress
from typing import NamedTuple

import pytest
from base_units import set_base_units
from checked import checked
from engine import counters, prompts, running, scheduler
from vllm import SamplingParams

from vllm_dhisparse.core.adaptation import Adaptation, AdaptiveResidency
from vllm_dhisparse.core.controller import Targets
from vllm_dhisparse.integration.scheduler_state import SchedulerState

from . import test_exactness as exactness

model, resident = exactness.model, exactness.resident
TOP_K = exactness.TOP_K
EAGER = {"dwell_steps": 0, "low_watermark_ratio": 0, "high_watermark_ratio": 0}
"""Settings under which spare memory is in use at once."""


def tokens_of(answers):
    return [answer[0] for answer in answers]


def state_of(llm):
    return scheduler(llm).connector.scheduler.state


class Step(NamedTuple):
    """What vLLM decided in a step, and what was spare then."""

    new: list[str]
    resumed: list[str]
    preempted: list[str]
    num_tokens: dict[str, int]
    optional_units: int


def given_id(request_id):
    """The id that the test gave; vLLM adds a random part."""
    return request_id.rpartition("-")[0]


def record_steps(llm):
    """A list that gets every step of the engine from now on."""
    steps = []
    schedule = scheduler(llm).schedule

    def recording(*arguments, **options):
        optional_units = state_of(llm).ledger.levels().optional_units
        done = schedule(*arguments, **options)
        num_tokens = {given_id(i): count for i, count in done.num_scheduled_tokens.items()}
        steps.append(
            Step(
                [given_id(request.req_id) for request in done.scheduled_new_reqs],
                sorted(map(given_id, done.scheduled_cached_reqs.resumed_req_ids)),
                sorted(map(given_id, done.preempted_req_ids or ())),
                num_tokens,
                optional_units,
            )
        )
        return done

    scheduler(llm).schedule = recording
    return steps


def add(llm, request_id, ids, max_tokens):
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": ids}, parameters)


def finish(llm):
    """Run all requests to their end; tokens by request."""
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return done


def adaptive(monkeypatch, model, **options):
    return checked(monkeypatch, model, residency="adaptive", **options)


@pytest.mark.parametrize("chunk", [64, 2048])
def test_mixed_lengths(monkeypatch, model, resident, chunk):
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": 8}
    with adaptive(monkeypatch, model, **options) as llm:
        answers = exactness.mixed_lengths(llm)
        assert "vllm:dhisparse_selected_rows{decode,host}" not in counters(llm)
    assert answers == resident(exactness.mixed_lengths, **options)


@pytest.mark.parametrize("rows", [0, TOP_K])
def test_prefix_caching_and_reset(monkeypatch, model, resident, rows):
    options = {"max_num_batched_tokens": 64}
    with adaptive(monkeypatch, model, base_rows_per_request=rows, **options) as llm:
        turns = [tokens_of(turn) for turn in exactness.conversation(llm)]
    expected = resident(exactness.conversation, **options)
    assert turns == [tokens_of(turn) for turn in expected]


def test_f32_a_flush_in_mid_answer(monkeypatch, model, resident):
    """Refused as long as requests run, unless they may start again; the tokens stay."""

    def undisturbed(llm):
        return exactness.outputs(llm, prompts(500, 90, seed=8), 30)

    with adaptive(monkeypatch, model, max_num_batched_tokens=256) as llm:
        for number, ids in enumerate(prompts(500, 90, seed=8)):
            add(llm, str(number), ids, 30)
        for _ in range(12):
            llm.llm_engine.step()
        units = state_of(llm).ledger.levels()
        assert not llm.reset_prefix_cache()
        assert state_of(llm).ledger.levels() == units
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert state_of(llm).pages.num_free == state_of(llm).pages.num_pages
        done = finish(llm)
    expected = tokens_of(resident(undisturbed, max_num_batched_tokens=256))
    assert [done[str(number)] for number in range(2)] == expected


def test_preemption_and_resume_without_capacity(monkeypatch, model, resident):
    options = {"max_model_len": 512}
    tiny = {"num_gpu_blocks_override": 40, "base_rows_per_request": 0}
    with adaptive(monkeypatch, model, **tiny, **options) as llm:
        answers = exactness.crowded(llm)
        found = counters(llm)
        assert found["vllm:num_preemptions{}"] > 0
    assert tokens_of(answers) == tokens_of(resident(exactness.crowded, **options))


def test_host_pages_run_out(monkeypatch, model, resident):
    gib = 12.5 * 128 * 192 * 4 * 6 / 2**30  # 12 pages
    options = {"max_model_len": 512}
    with adaptive(monkeypatch, model, host_pool_gib=gib, **EAGER, **options) as llm:
        assert state_of(llm).pages.num_pages == 12
        answers = [exactness.crowded(llm) for _ in range(2)]
    expected = tokens_of(resident(exactness.crowded, **options))
    assert [tokens_of(answer) for answer in answers] == [expected, expected]


def arrivals_and_aborts(llm, seed=1):
    """A crowd that grows into its next block at once, then random arrivals and aborts."""
    for number, ids in enumerate(prompts(*[100] * 12, seed=9)):
        add(llm, f"crowd {number}", ids, 60)
    done = finish(llm)
    rng = random.Random(seed)
    texts = prompts(*[rng.randrange(1, 700) for _ in range(14)], seed=seed)
    for number, ids in enumerate(texts):
        add(llm, str(number), ids, 40)
        for _ in range(rng.randrange(4)):
            for output in llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        if number % 4 == 3:
            llm.llm_engine.abort_request([str(number - rng.randrange(2))])
    return done | finish(llm)


class RandomCapacity:
    """In place of the controller: another capacity each step, zero included."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.num_zero = self.num_adopted = self.num_restored = 0

    def adapt(self, residency, *seen):
        ledger, rng = residency._ledger, self.rng
        match rng.randrange(6):
            case 0:
                ledger.optional.give_up(ledger.levels().optional_units)
            case 1:
                ledger.optional.give_up(rng.randrange(20))
            case 2:
                ledger.optional.refill_reserve(rng.randrange(100))
            case 3:
                with suppress(ValueError):  # too few blocks are free
                    set_base_units(ledger, rng.randrange(4))
            case _:
                units = ledger.optional.adopt(rng.randrange(20), 0)
                units += ledger.optional.recycle(rng.randrange(8))
                self.num_adopted += len(units)
                self.num_restored += residency.restore(units[: rng.randrange(20)])
        levels = ledger.levels()
        self.num_zero += not levels.optional_units + levels.required_units
        ledger.check_integrity()
        return Adaptation(Targets(0, 0, "hold"), 0.0, 0, 0, ledger.optional.take_reclaimed(), 0)


@pytest.fixture
def random_capacity(monkeypatch):
    driver = RandomCapacity(seed=2)
    monkeypatch.setattr(AdaptiveResidency, "adapt", lambda *arguments: driver.adapt(*arguments))
    return driver


def test_random_capacity_changes_nothing(monkeypatch, model, resident, random_capacity):
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with adaptive(monkeypatch, model, **options) as llm:
        answers = exactness.mixed_lengths(llm)
        turns = [tokens_of(turn) for turn in exactness.conversation(llm)]
    assert answers == resident(exactness.mixed_lengths, **options)
    assert turns == [tokens_of(turn) for turn in resident(exactness.conversation, **options)]
    assert random_capacity.num_zero > 10
    assert random_capacity.num_restored > 50


def test_random_capacity_in_a_crowded_pool(monkeypatch, model, resident, random_capacity):
    options = {"max_model_len": 1024}
    small = {"num_gpu_blocks_override": 110, "max_num_batched_tokens": 128}
    with adaptive(monkeypatch, model, **small, **options) as llm:
        done = arrivals_and_aborts(llm)
        assert counters(llm)["vllm:num_preemptions{}"] > 0
    expected = resident(arrivals_and_aborts, **options)
    both = set(done) & set(expected)  # an abort may come before or after the end
    assert len(both) >= 20
    assert {number: done[number] for number in both} == {n: expected[n] for n in both}
    assert random_capacity.num_adopted


@pytest.mark.parametrize("caching", [True, False])
def test_optional_memory_delays_nobody(monkeypatch, model, caching):
    """Law 7: step by step the admissions and preemptions of `fixed` with the same share.

    With the head reserve, optional units also cost no prefix hit; without it vLLM takes
    them itself.
    """
    runs = []
    reserve = {} if caching else {"head_reserve_blocks": 0}
    options = {"max_model_len": 1024, "max_num_batched_tokens": 128}
    options |= {"enable_prefix_caching": caching, "num_gpu_blocks_override": 70}
    for settings in (
        {"residency": "fixed", "fixed_rows_per_request": TOP_K},
        {"residency": "adaptive", "base_rows_per_request": TOP_K, **EAGER, **reserve},
    ):
        with running(model, settings, **options) as llm:
            steps = record_steps(llm)
            done = arrivals_and_aborts(llm)
            runs.append((done, steps, counters(llm)))
    (tokens, steps, _), (same_tokens, same_steps, found) = runs
    assert tokens == same_tokens
    assert [step[:4] for step in steps] == [step[:4] for step in same_steps]
    assert any(step.resumed for step in steps), "nothing was preempted"
    assert any(step.new and step.optional_units > 10 for step in same_steps)
    reason = "reserve" if caching else "pressure"
    assert found[f"vllm:dhisparse_reclaimed_bytes{{{reason}}}"] > 0


def restored_spans(llm, monkeypatch):
    """A list that gets the spans restored from now on, those of a step together."""
    found = []
    ledger = state_of(llm).ledger
    restore, fill = AdaptiveResidency.restore, ledger.fill

    def restoring(residency, units):
        found.append([])
        return restore(residency, units)

    def filling(unit, span, *place):
        found[-1].append(span)
        fill(unit, span, *place)

    monkeypatch.setattr(AdaptiveResidency, "restore", restoring)
    monkeypatch.setattr(ledger, "fill", filling)
    return found


def fetch_ratio(llm, since):
    found = counters(llm)
    fetched, selected = (
        sum(found[k] - since.get(k, 0) for k in found if k.startswith(f"vllm:dhisparse_{name}{{d"))
        for name in ("fetched_rows", "selected_rows")
    )
    return fetched / selected


def test_a_prefix_hit_is_restored_newest_first(monkeypatch, model):
    options = {"restore_rows_per_step": 4 * 64, "max_num_batched_tokens": 2048}
    first, rest = prompts(1900, 300, seed=5)
    with adaptive(monkeypatch, model, **EAGER, **options) as llm:
        exactness.outputs(llm, [first], 2)
        state = state_of(llm)
        state.ledger.optional.give_up(state.ledger.levels().optional_units)
        restored = restored_spans(llm, monkeypatch)
        add(llm, "hit", first + rest, 60)
        num_hit = 1900 // 128 * 128
        begin = counters(llm)
        for _ in range(5):
            llm.llm_engine.step()
        early = fetch_ratio(llm, begin)
        for _ in range(15):
            llm.llm_engine.step()
        late = counters(llm)
        finish(llm)
        assert fetch_ratio(llm, late) < 0.01 < early
    spans = [span.position for step in restored for span in step]
    assert spans == list(range(num_hit // 64))[::-1]
    assert max(map(len, restored)) <= 4


def test_a_hit_on_rows_of_the_same_step_waits_for_them(monkeypatch, model):
    prefix, *rests = prompts(640, 10, 20, seed=6)
    with adaptive(monkeypatch, model, **EAGER) as llm:
        restored = restored_spans(llm, monkeypatch)
        steps = record_steps(llm)
        for number, rest in enumerate(rests):
            add(llm, str(number), prefix + rest, 20)
        llm.llm_engine.step()
        assert steps[0].num_tokens == {"0": 650, "1": 20}, "a hit in the step that computes it"
        assert not any(restored)
        finish(llm)
        assert any(restored)


def load_step(llm):
    """Fetch ratios of two long requests: alone, with eight others, 300 steps later."""
    texts = prompts(600, 600, *[1000] * 8, seed=7)
    for number in range(2):
        add(llm, f"long-{number}", texts[number], 520)
    ratios, done = [], {}

    def run(num_steps):
        for _ in range(num_steps):
            for output in llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)

    run(5)
    for num_measured, num_settling in ((50, 0), (70, 300), (50, 0)):
        begin = counters(llm)
        run(num_measured)
        ratios.append(fetch_ratio(llm, begin))
        if len(ratios) == 1:
            for number in range(2, 10):
                add(llm, f"short-{number}", texts[number], 60)
        run(num_settling)
    assert len(done) == 8, "the short ones ended, the long ones not"
    return ratios, done | finish(llm)


def test_a_load_step(monkeypatch, model):
    """The pool holds a third of the history of all requests, and that of the long ones."""
    units, pages = 8 * 17 + 2 * 12, 8 * 9 + 2 * 6
    options = {"num_gpu_blocks_override": (3 * units + pages) // 3, "max_model_len": 2048}
    options |= {"max_num_batched_tokens": 128}
    runs = {}
    for residency in ("fixed", "adaptive"):
        with running(model, {"residency": residency}, **options) as llm:
            runs[residency] = load_step(llm)
            found = counters(llm)
            assert "vllm:num_preemptions{}" not in found
    assert found["vllm:dhisparse_reclaimed_bytes{reserve}"] > 0
    assert found["vllm:dhisparse_adopted_units{restored}"] > 0
    (fixed, tokens), (adapted, same_tokens) = runs["fixed"], runs["adaptive"]
    assert tokens == same_tokens
    for phase in (0, 2):
        assert adapted[phase] <= fixed[phase] / 10, (fixed, adapted)


def test_drafts_get_shorter_before_a_request_is_preempted(monkeypatch, model, resident):
    options = {"max_model_len": 512, "max_num_seqs": 16}
    speculation = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1}
    pool = {"num_gpu_blocks_override": 60, "base_rows_per_request": 0, **EAGER}
    limits = []
    begin_step = SchedulerState.begin_step

    def recording(state):
        begin_step(state)
        limits.append(state.draft_tokens)

    monkeypatch.setattr(SchedulerState, "begin_step", recording)
    with adaptive(monkeypatch, model, speculative_config=speculation, **pool, **options) as llm:
        tokens = tokens_of(crowd(llm))
    assert tokens == tokens_of(resident(crowd, **options))
    assert {0, 7} <= set(limits), "the length did not follow the room"
    assert limits[-1] == 7


def crowd(llm):
    return exactness.outputs(llm, prompts(*[100] * 24, seed=9), 40)
