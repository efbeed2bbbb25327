"""vLLM's own rejection sampler on drafts drawn as the speculators draw them (F52).

A small vocabulary, many seeds: each emitted token follows the target, given the tokens before
it. The algebra of the rule is in tests/integration/test_acceptance_rule.py.
"""

import math

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

from vllm_dhisparse.integration.v2_runner import complete_sampler

VOCABULARY, DRAFTS, REQUESTS = 4, 2, 400  # of which the interpreter does 20 a second
TEMPERATURE = 0.8
TEMPERATURES = torch.full((REQUESTS,), TEMPERATURE)
SEEDS = torch.arange(REQUESTS, dtype=torch.int64) * 7919 + 11
UNLIKELY = 1e-4
"""Chance that a right sampler fails a comparison; seeds are fixed, so it does so ever or never."""


def logits_by_prefix(generator, length, support=VOCABULARY):
    """Random logits [VOCABULARY ** length, VOCABULARY]; -inf outside of a random support."""
    found = torch.randn(VOCABULARY**length, VOCABULARY, generator=generator)
    outside = torch.rand(found.shape, generator=generator).argsort(dim=1) >= support
    return found.masked_fill(outside, -torch.inf)


def draw(proposal):
    """Drafts [REQUESTS, DRAFTS] and the logits they came from, as speculators keep them."""
    index = torch.arange(REQUESTS)
    kept = torch.full((REQUESTS, DRAFTS, VOCABULARY), -torch.inf)
    drafts = torch.zeros(REQUESTS, DRAFTS, dtype=torch.int64)
    prefix = torch.zeros(REQUESTS, dtype=torch.int64)
    for place in range(DRAFTS):
        drafts[:, place] = gumbel_sample(
            proposal[place][prefix].contiguous(),
            index,
            TEMPERATURES,
            SEEDS,
            torch.full((REQUESTS,), 100 + place),
            apply_temperature=True,
            is_drafting=True,
            logits_cache=kept,
            logits_cache_col=torch.full((REQUESTS,), place, dtype=torch.int32),
        )
        prefix = prefix * VOCABULARY + drafts[:, place]
    return drafts, kept


def verify(target, drafts, kept):
    """Emitted tokens [REQUESTS, DRAFTS + 1] and how many of each row count."""
    rows = DRAFTS + 1
    prefix = torch.zeros(REQUESTS, dtype=torch.int64)
    logits = torch.empty(REQUESTS, rows, VOCABULARY)
    for place in range(rows):
        # The sampler gets logits with all sampling parameters applied.
        logits[:, place] = target[place][prefix] / TEMPERATURE
        if place < DRAFTS:
            prefix = prefix * VOCABULARY + drafts[:, place]
    checked = torch.cat([torch.zeros(REQUESTS, 1, dtype=torch.int64), drafts], dim=1)
    return rejection_sampler_utils.rejection_sample(
        logits.flatten(0, 1),
        kept,
        checked.flatten(),
        torch.arange(REQUESTS + 1, dtype=torch.int32) * rows,
        (100 + torch.arange(rows)).repeat(REQUESTS),
        torch.arange(REQUESTS),
        torch.arange(REQUESTS).repeat_interleave(rows),
        torch.arange(rows, dtype=torch.int32).repeat(REQUESTS),
        TEMPERATURES,
        SEEDS,
        DRAFTS,
    )


def surprise(tokens, probabilities):
    """Chance of counts as uneven as these under the probabilities: chi-square, Wilson-Hilferty."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = VOCABULARY - 1
    spread = 2 / (9 * freedom)
    score = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(score / math.sqrt(2))


def least_chance(target, sampled, number):
    """The least chance over places, each prefix with enough samples apart."""
    chances = []
    prefix = torch.zeros(REQUESTS, dtype=torch.int64)
    for place in range(DRAFTS + 1):
        emitted = number > place
        for tokens_before in prefix[emitted].unique():
            some = sampled[emitted & (prefix == tokens_before), place]
            right = (target[place][tokens_before] / TEMPERATURE).softmax(0)
            if len(some) * right.min() >= 5:
                chances.append(surprise(some, right))
        prefix = prefix * VOCABULARY + sampled[:, place].clamp(min=0)
    assert len(chances) >= 3
    return min(chances)


def drawn(**proposal_kind):
    """Target, drafts, and the logits that they were drawn from."""
    generator = torch.Generator().manual_seed(3)
    # Flatter than proposals, so that every token is seen often enough after every prefix.
    target = [logits_by_prefix(generator, place) / 2 for place in range(DRAFTS + 1)]
    proposal = [logits_by_prefix(generator, place, **proposal_kind) for place in range(DRAFTS)]
    return target, *draw(proposal)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"support": 2}, id="dflash2"),  # walks over the best candidates only
        pytest.param({}, id="dspark"),  # a Markov head follows the drawn prefix
    ],
)
def test_emitted_tokens_follow_the_target(kind):
    complete_sampler()
    target, drafts, kept = drawn(**kind)
    sampled, number = verify(target, drafts, kept)
    accepted = number.double() - 1
    assert 0 < accepted.mean() < DRAFTS
    assert least_chance(target, sampled, number) > UNLIKELY


def test_the_comparison_notices_drafts_of_another_distribution_than_the_one_kept():
    complete_sampler()
    target, drafts, kept = drawn()
    sampled, number = verify(target, drafts, kept.flip(2))
    assert least_chance(target, sampled, number) < UNLIKELY
