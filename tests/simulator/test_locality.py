"""Locality of generated and recorded selections against published figures.

``pytest -s`` prints the tables.
"""

import numpy as np
import pytest
from workloads import TRACES, recorded_streams

from vllm_dhisparse.core.traces import read_trace
from vllm_dhisparse.simulator import streams
from vllm_dhisparse.simulator.anchors import PUBLISHED, miss_shares, pooled_over_groups
from vllm_dhisparse.simulator.locality import ORDINARY, SCATTERED, positions
from vllm_dhisparse.simulator.streams import Stream

CONTEXT, TOP_K = 7168, 160
TEXTS = ("novel", "handbook", "argparse", "gen-novel", "copy-argparse")
GROUPS = 4


def line(shares):
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


@pytest.fixture(scope="module")
def ordinary():
    return positions(ORDINARY, CONTEXT, 1024, TOP_K, np.random.default_rng(1))


def test_generated_selections_have_the_published_locality(ordinary):
    found = miss_shares([(CONTEXT, ordinary)])
    print(f"\npublished: {line(PUBLISHED)}\ngenerated: {line(found)}")
    for name, share in PUBLISHED.items():
        assert found[name] == pytest.approx(share, rel=0.15), name


@pytest.mark.parametrize("text", TEXTS)
def test_recorded_selections_are_near_the_published_locality(text):
    """A much smaller model, without any fit. Copying reads far back and misses more."""
    found = miss_shares(recorded_streams(text)[:GROUPS])
    print(f"\n{text}: {line(found)}")
    for name, share in PUBLISHED.items():
        bound = 0.8 if text == "copy-argparse" else 0.35
        assert found[name] == pytest.approx(share, rel=bound), name
    assert found["MIN 2k"] < found["LRU 2k"] < found["random 2k"] < found["FIFO 2k"]


def test_one_cache_for_all_layer_groups_misses_less_only_where_it_is_large():
    """Whether its fewer misses are worth blocks of one layer group each, instead of units."""
    saved = {}
    for text in TEXTS:
        for size in (2, 4, 8):
            equal, one = pooled_over_groups(recorded_streams(text)[:GROUPS], size * TOP_K)
            saved.setdefault(size, []).append(1 - one / equal)
            print(f"\n{text}, {size} k a group: equal {equal:.2%}, one cache {one:.2%}", end="")
    assert np.mean(saved[2]) < 0.04
    assert 0.1 < np.mean(saved[8]) < 0.35


def test_scattered_selections_change_as_much_as_published(ordinary):
    scattered = positions(SCATTERED, CONTEXT, 300, TOP_K, np.random.default_rng(1))

    def overlap(selected):
        pairs = zip(selected[100:-1:5], selected[101::5], strict=False)
        return np.mean([np.intersect1d(a, b).size / TOP_K for a, b in pairs])

    assert 0.35 < overlap(scattered) < 0.5
    assert overlap(ordinary) > 0.62


@pytest.mark.parametrize("text", ["novel", "argparse"])
def test_rejected_drafts_fetch_as_much_as_measured(text):
    """2 tokens a step with 8 queries fetch 2.3 to 2.7 times the rows of 2 right queries."""
    made = streams.recorded([read_trace(TRACES / f"smollm2-{text}.npz")], GROUPS)
    for size in (2, 4, 8):
        rows = size * TOP_K
        fetched = {
            queries: sum(lru_fetches(made, group, rows, queries) for group in range(GROUPS))
            for queries in (2, 4, 8)
        }
        print(f"\n{text}, {size} k: {fetched[4] / fetched[2]:.2f}, {fetched[8] / fetched[2]:.2f}")
        assert 1.4 < fetched[4] / fetched[2] < 1.75
        assert 2.2 < fetched[8] / fetched[2] < 2.75


def lru_fetches(made, group, capacity, queries, accepted=2):
    """Rows that verify steps fetch into an exact LRU cache of one request."""
    stream: Stream = made.streams[0][group]
    last = np.full(stream.context + 1100, -1)
    fetched = 0
    for number, step in enumerate(range(0, 512, accepted)):
        selected = made.selections(0, group, step, queries, accepted, number)
        end = stream.context + step + accepted  # rows after it are of drafts
        last[end - accepted : end] = number
        union = np.unique(selected[(selected >= 0) & (selected < end)])
        if number >= 64:
            fetched += (last[union] < 0).sum()
        last[union] = number
        held = np.flatnonzero(last >= 0)
        over = held.size - capacity
        if over > 0:
            others = held[last[held] < number]
            last[others[np.argsort(last[others], kind="stable")[:over]]] = -1
    return fetched
