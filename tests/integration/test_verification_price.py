"""vLLM's choice of verified drafts once fetches have a price.

Adaptive verification runs on CUDA graphs only. Here vLLM's class and this package's parts on
both sides work on CPU tensors, without an engine.
"""

from contextlib import contextmanager
from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

from vllm_dhisparse.core.drafts import FetchPrice
from vllm_dhisparse.integration import verification as priced
from vllm_dhisparse.integration.draft_price import DraftPrice
from vllm_dhisparse.integration.messages import StepMetadata
from vllm_dhisparse.integration.row_counters import HostRowCounters
from vllm_dhisparse.integration.verification import PricedVerification
from vllm_dhisparse.integration.worker_side import WorkerSide


def verification(confidences, curves):
    """vLLM's own budget over given confidences and costs, without its GPU buffers."""
    requests, num_drafts = confidences.shape
    manager = object.__new__(PricedVerification)
    manager.num_speculative_steps = num_drafts
    manager.num_bonus_tokens = 1
    manager._max_total_logits = 1000
    manager._stale_confidences = [SimpleNamespace(np=confidences)]
    manager._stale_idx = 0
    manager.cost_tables = adaptive.build_cost_tables_from_curves(*curves, requests, 100)
    manager.req_states = SimpleNamespace(
        req_id_to_index={str(i): i for i in range(requests)},
        num_computed_tokens_np=np.full(requests, 10),
        prefill_len=SimpleNamespace(np=np.full(requests, 10)),
    )
    return manager


@contextmanager
def in_worker(fetch_ms_per_draft):
    """The worker's part of the connector, after a step with this price."""
    worker = object.__new__(WorkerSide)
    worker.fetch_ms_per_draft, worker.verified = fetch_ms_per_draft, None
    with pytest.MonkeyPatch.context() as patch:
        connector = SimpleNamespace(worker=worker)
        patch.setattr(priced, "get_kv_transfer_group", lambda: connector)
        yield worker


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
    manager = verification(confidences, (draft_curve, verify_curve))
    ids = [str(i) for i in range(requests)]
    fetch = price.ms_per_draft
    with in_worker(fetch) as worker:
        tokens = manager.get_num_tokens(
            dict.fromkeys(ids, 1 + num_drafts), {i: [0] * num_drafts for i in ids}
        )
    assert worker.verified == (requests, tokens - requests)

    draft_ms, table = manager.cost_tables
    table = table + np.arange(len(table)) * fetch
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


def chosen_tokens(fetch_ms):
    """Tokens of a step of four requests with seven likely drafts each."""
    confidences = np.full((4, 7), 0.7)
    manager = verification(confidences, ([(4, 1.0)], [(8, 20.0), (32, 24.0)]))
    ids = [str(i) for i in range(4)]
    with in_worker(fetch_ms) as worker:
        tokens = manager.get_num_tokens(dict.fromkeys(ids, 8), {i: [0] * 7 for i in ids})
    return tokens, worker


def step_output(num_output_tokens, drafts):
    """What of a scheduler's output the price is made of."""
    return SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(num_output_tokens), num_output_tokens=list(num_output_tokens.values())
        ),
        scheduled_spec_decode_tokens=drafts,
    )


def test_what_workers_fetched_shortens_what_they_verify():
    """Both sides in turn: report, price, message, choice."""
    price = DraftPrice(row_bytes=78 * 656)
    drafts = {str(i): [0] * 7 for i in range(4)}
    assert price.next_ms(step_output(dict.fromkeys(drafts, 1), drafts)) == 0
    before, worker = chosen_tokens(0.0)
    worker.counters = HostRowCounters(True, [1])
    worker.counters._totals.add_rows(
        0, torch.zeros(2, 4).long(), torch.tensor([40_000, 0]), 0, verifies=True
    )
    worker._link_bytes_per_ms = 50e6
    report = worker.take_report()
    assert report.verified == (4, before - 4)
    assert worker.take_report().verified is None, "a step counts once"
    price.note_report(report)

    # Two drafts of each request were accepted.
    fetch_ms = price.next_ms(step_output(dict.fromkeys(drafts, 4), drafts))
    acceptance = 8 / (before - 4)
    share = acceptance + 0.55 * (1 - acceptance)
    rows = 40_000 / (4 + (before - 4) * share)
    assert fetch_ms == pytest.approx(share * rows * 78 * 656 / 50e6)
    worker._recorder, worker._ring_caches, worker.state = None, [], None
    worker.begin_step(StepMetadata((), None, fetch_ms_per_draft=fetch_ms))
    assert 4 < chosen_tokens(worker.fetch_ms_per_draft)[0] < before


def test_vllm_builds_the_priced_choice_for_this_package_alone():
    stock = adaptive.AdaptiveVerificationManager
    try:
        priced.choose_verification(is_priced=True)
        assert adaptive.AdaptiveVerificationManager is priced.PricedVerification
    finally:
        priced.choose_verification(is_priced=False)
    assert adaptive.AdaptiveVerificationManager is stock
