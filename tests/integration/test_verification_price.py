"""vLLM's choice of verified drafts once fetches have a price (failure case F53)."""

from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

from vllm_dhisparse.core.drafts import FetchPrice, with_fetch_time


def verification(confidences, curves, price):
    """vLLM's own budget over given confidences and priced costs, without its GPU buffers."""
    requests, num_drafts = confidences.shape
    manager = object.__new__(adaptive.AdaptiveVerificationManager)
    manager.num_speculative_steps = num_drafts
    manager.num_bonus_tokens = 1
    manager._max_total_logits = 1000
    manager._stale_confidences = [SimpleNamespace(np=confidences)]
    manager._stale_idx = 0
    draft_ms, verify_ms = adaptive.build_cost_tables_from_curves(*curves, requests, 100)
    manager.cost_tables = draft_ms, with_fetch_time(verify_ms, price)
    manager.req_states = SimpleNamespace(
        req_id_to_index={str(i): i for i in range(requests)},
        num_computed_tokens_np=np.full(requests, 10),
        prefill_len=SimpleNamespace(np=np.full(requests, 10)),
    )
    return manager


@given(
    st.integers(1, 3).flatmap(
        lambda r: st.lists(
            st.lists(st.floats(0.05, 1), min_size=3, max_size=3), min_size=r, max_size=r
        )
    ),
    st.floats(0, 400),
)
def test_priced_verification_equals_brute_force(confidences, missed_rows):
    confidences = np.array(confidences)
    requests, num_drafts = confidences.shape
    price = FetchPrice(
        missed_rows=missed_rows, bytes_per_row=1152, link_bytes_per_ms=50_000, acceptance=0.4
    )
    draft_curve = [(1, 1.0), (8, 1.5)]
    verify_curve = [(n, 20.0 + 0.4 * n) for n in range(1, 13)]  # no steps
    manager = verification(confidences, (draft_curve, verify_curve), price)
    ids = [str(i) for i in range(requests)]
    tokens = manager.get_num_tokens(
        dict.fromkeys(ids, 1 + num_drafts), {i: [0] * num_drafts for i in ids}
    )

    draft_ms, table = manager.cost_tables
    fetch = price.ms_per_draft
    best = 0.0
    for lengths in product(range(num_drafts + 1), repeat=requests):
        accepted = sum(
            prod(row[: i + 1])
            for row, k in zip(confidences, lengths, strict=True)
            for i in range(k)
        )
        n = requests + sum(lengths)
        cost = draft_ms[requests] + 20.0 + 0.4 * n + n * fetch
        best = max(best, (requests + accepted) / cost)
    survival = np.sort(np.cumprod(confidences, axis=1).ravel())[::-1]
    chosen = tokens - requests
    reached = (requests + survival[:chosen].sum()) / (draft_ms[requests] + table[tokens])
    assert reached == pytest.approx(best)


def test_a_dear_fetch_shortens_verification():
    confidences = np.full((4, 7), 0.7)
    ids = [str(i) for i in range(4)]

    def tokens(missed_rows):
        price = FetchPrice(
            missed_rows=missed_rows,
            bytes_per_row=78 * 656,
            link_bytes_per_ms=50_000_000,
            acceptance=0.4,
        )
        manager = verification(confidences, ([(4, 1.0)], [(8, 20.0), (32, 24.0)]), price)
        return manager.get_num_tokens(dict.fromkeys(ids, 8), {i: [0] * 7 for i in ids})

    assert tokens(0) > tokens(4000) > 4
