"""Tokens are those of no speculation, and drafts depend neither on residency nor on rings.

Failure cases F42 (tokens), F43 (every draft, also at temperature 1) and F44 (accepted by place).
"""

import pytest
from draft_record import assert_same_drafts, speculate
from speculation_settings import speculative_config

SHARED = {"layers": 6, "leaders": 2}
UNSHARED = {"layers": 3, "leaders": 3}
TARGETS = {"shared": SHARED, "unshared": UNSHARED}
WINDOW = 40
LENGTHS = (5, 70, 300)  # shorter than the window, longer than it, longer than the ring
TOKENS = 12
CHOSEN = [
    ("shared", "dspark", 4, [("resident", "ring"), ("fixed", "ring"), ("adaptive", "full")]),
    ("shared", "dflash2", 4, [("fixed", "full"), ("adaptive", "ring")]),
    ("shared", "dflash", 4, [("adaptive", "ring")]),
    ("shared", "dspark", 7, [("fixed", "ring")]),
    ("shared", "dflash2", 7, [("adaptive", "ring")]),
    ("shared", "dspark", 1, [("adaptive", "ring")]),
    ("unshared", "dspark", 4, [("fixed", "ring")]),
    ("unshared", "dflash2", 1, [("adaptive", "ring")]),
]
OTHERS = [
    ("resident", "ring"),
    ("fixed", "ring"),
    ("fixed", "full"),
    ("adaptive", "ring"),
    ("adaptive", "full"),
]


@pytest.fixture(scope="module")
def without(tiny_pair):
    """Tokens of the target alone, on the same runner."""
    known = {}

    def run(target):
        if target not in known:
            model, _ = tiny_pair(TARGETS[target], window=WINDOW)
            with pytest.MonkeyPatch.context() as patch:
                known[target] = speculate(patch, model, {"residency": "resident"}, LENGTHS, TOKENS)
            assert not known[target].drafts
        return known[target].tokens

    return run


def compare(tiny_pair, without, monkeypatch, target, method, num_drafts, others, **options):
    """Return the outcomes, vLLM's own placement first, after comparing them with it."""
    model, drafter = tiny_pair(TARGETS[target], method=method, window=WINDOW)
    options |= {"max_model_len": 1024, "max_num_seqs": 4}
    temperature = options.pop("temperature", 0)
    more = {"draft_sample_method": "probabilistic"} if temperature else {}
    config = speculative_config(method, drafter, num_drafts, **more)
    outcomes = [
        speculate(
            monkeypatch,
            model,
            {"residency": residency, "draft_kv": draft_kv},
            LENGTHS,
            TOKENS,
            temperature=temperature,
            speculative_config=config,
            **options,
        )
        for residency, draft_kv in [("resident", "full"), *others]
    ]
    reference = outcomes[0]
    if not temperature:
        assert reference.tokens == without(target)
    for outcome in outcomes[1:]:
        assert outcome.tokens == reference.tokens
        assert_same_drafts(outcome.drafts, reference.drafts)
        assert outcome.accepted == reference.accepted
    return outcomes


@pytest.mark.parametrize(("target", "method", "num_drafts", "others"), CHOSEN)
def test_greedy_tokens_and_drafts(
    tiny_pair, without, monkeypatch, target, method, num_drafts, others
):
    outcome, *_ = compare(tiny_pair, without, monkeypatch, target, method, num_drafts, others)
    if method != "dflash":  # which knows nothing of its target
        proposed = sum(len(d.tokens) for drafts in outcome.drafts.values() for d in drafts)
        assert sum(outcome.accepted) > proposed // 20
        assert sum(outcome.accepted) < proposed - 3, "nothing was rejected"


@pytest.mark.parametrize("method", ["dspark", "dflash2"])
def test_seeded_samples_and_drafts(tiny_pair, without, monkeypatch, method):
    others = [("fixed", "ring"), ("adaptive", "ring")]
    outcome, *_ = compare(
        tiny_pair, without, monkeypatch, "shared", method, 4, others, temperature=1
    )
    assert sum(outcome.accepted) > 0
    assert outcome.tokens != without("shared")


@pytest.mark.sweep
@pytest.mark.parametrize("num_drafts", [1, 4, 7])
@pytest.mark.parametrize("method", ["dspark", "dflash2", "dflash"])
@pytest.mark.parametrize("target", TARGETS)
def test_whole_matrix(tiny_pair, without, monkeypatch, capsys, target, method, num_drafts):
    outcomes = compare(tiny_pair, without, monkeypatch, target, method, num_drafts, OTHERS)
    with capsys.disabled():
        for mode, outcome in zip([("resident", "full"), *OTHERS], outcomes, strict=True):
            cells = [target, method, num_drafts, *mode, outcome.accepted]
            cells += sharing(outcome.counters)
            print("\n|", " | ".join(map(str, cells)), "|", end="", flush=True)


def sharing(counters):
    """Rows of verify steps: selected, of them missing, fetched, and missing over fetched."""
    rows = {
        tier: counters.get(f"vllm:dhisparse_selected_rows{{verify,{tier}}}", 0)
        for tier in ("tail", "required", "optional", "host")
    }
    fetched = counters.get("vllm:dhisparse_fetched_rows{verify}", 0)
    gain = f"{rows['host'] / fetched:.2f}" if fetched else "-"
    return [*(f"{count:.0f}" for count in (sum(rows.values()), rows["host"], fetched)), gain]
