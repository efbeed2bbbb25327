"""Accept and resample give the target's distribution, by exact enumeration (failure case F52).

The rule is vLLM's (rejection sampling of speculative decoding, arXiv 2211.17192): a draft x
is accepted with probability min(1, p(x) / q(x)); after the first rejection the token comes
from the positive part of p - q; after full acceptance from p. Residency must never enter it.
"""

import random
from fractions import Fraction
from itertools import product

import pytest

NUM_DRAFTS = 2


def distribution(rng, vocabulary, support=None):
    """Random exact probabilities; zero outside of a random support of the given size."""
    tokens = rng.sample(range(vocabulary), support or vocabulary)
    weights = {token: rng.randint(1, 9) for token in tokens}
    total = sum(weights.values())
    return [Fraction(weights.get(token, 0), total) for token in range(vocabulary)]


def conditionals(rng, vocabulary, support=None, follows_prefix=True):
    """A distribution of the next token for each prefix of up to NUM_DRAFTS tokens."""
    found = {}
    for length in range(NUM_DRAFTS + 1):
        common = distribution(rng, vocabulary, support)
        for prefix in product(range(vocabulary), repeat=length):
            found[prefix] = distribution(rng, vocabulary, support) if follows_prefix else common
    return found


def step(target, proposal, num_verified):
    """All outcomes of a step: emitted tokens -> probability.

    ``num_verified(drafts)``: how many of the drafts the target looks at.
    """
    vocabulary = range(len(target[()]))
    outcomes = {}

    def emit(tokens, probability):
        outcomes[tokens] = outcomes.get(tokens, 0) + probability

    for drafts in product(vocabulary, repeat=NUM_DRAFTS):
        left = Fraction(1)
        for i, draft in enumerate(drafts):
            left *= proposal[drafts[:i]][draft]
        if not left:
            continue
        verified = num_verified(drafts)
        for i in range(verified):
            p, q = target[drafts[:i]], proposal[drafts[:i]]
            accept = min(Fraction(1), p[drafts[i]] / q[drafts[i]])
            if accept < 1:
                residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
                for token in vocabulary:
                    share = residual[token] / sum(residual)
                    emit((*drafts[:i], token), left * (1 - accept) * share)
            left *= accept
        prefix = drafts[:verified]
        for token in vocabulary:
            emit((*prefix, token), left * target[prefix][token])
    return outcomes


def first_tokens(outcomes, target, length):
    """The distribution of the first tokens; those after a step come from the target."""
    found = {}
    for tokens, probability in outcomes.items():
        for rest in product(range(len(target[()])), repeat=max(0, length - len(tokens))):
            whole, share = tokens, probability
            for token in rest:
                share *= target[whole][token]
                whole = (*whole, token)
            found[whole[:length]] = found.get(whole[:length], 0) + share
    return found


def of_target(target, length):
    found = {}
    for tokens in product(range(len(target[()])), repeat=length):
        share = Fraction(1)
        for i, token in enumerate(tokens):
            share *= target[tokens[:i]][token]
        found[tokens] = share
    return found


def nonzero(found):
    return {tokens: share for tokens, share in found.items() if share}


PROPOSALS = {
    "dflash": {"follows_prefix": False},  # positions are independent
    "dflash2": {"support": 2},  # walks over the best candidates only
    "dspark": {},  # a Markov head follows the drawn prefix
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", PROPOSALS)
def test_the_output_follows_the_target(kind, seed):
    rng = random.Random(seed)
    target = conditionals(rng, 4)
    proposal = conditionals(rng, 4, **PROPOSALS[kind])
    for count in range(NUM_DRAFTS + 1):
        outcomes = step(target, proposal, lambda drafts, count=count: count)
        assert sum(outcomes.values()) == 1
        for length in (1, 2):
            assert nonzero(first_tokens(outcomes, target, length)) == of_target(target, length)


@pytest.mark.parametrize("seed", range(4))
def test_verifying_less_by_what_is_known_before_the_draw_keeps_the_target(seed):
    rng = random.Random(seed)
    target, proposal = conditionals(rng, 4), conditionals(rng, 4)

    def by_earlier_drafts(drafts):
        is_sure = max(proposal[drafts[:1]]) > Fraction(1, 3)  # of the draft not drawn yet
        return 2 if is_sure else 1

    outcomes = step(target, proposal, by_earlier_drafts)
    for length in (1, 2):
        assert nonzero(first_tokens(outcomes, target, length)) == of_target(target, length)


def test_verifying_less_by_the_drawn_token_itself_does_not():
    """The counterexample of the DSpark paper's appendix A in kind."""
    rng = random.Random(1)
    target, proposal = conditionals(rng, 4), conditionals(rng, 4)

    def by_own_draft(drafts):
        return 1 if proposal[()][drafts[0]] > Fraction(1, 4) else 0

    outcomes = step(target, proposal, by_own_draft)
    assert nonzero(first_tokens(outcomes, target, 1)) != of_target(target, 1)
