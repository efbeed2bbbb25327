"""Draft rings: the blocks of a request, its block table, and attention behind a prefix hit."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_interface import SlidingWindowSpec as WindowSpec

from vllm_dhisparse.core.page_plan import plan_pages
from vllm_dhisparse.integration import row_counters
from vllm_dhisparse.integration.draft_layers import draft_spec, without_null_blocks
from vllm_dhisparse.integration.draft_ring import DraftRingSpec, draft_rings, register_ring_spec
from vllm_dhisparse.integration.draft_window import attends_to_all, impose_window
from vllm_dhisparse.integration.row_counters import HostRowCounters
from vllm_dhisparse.integration.speculators import rows_behind

from .kv_setup import Setup, indexer_spec, latent_spec, make_request, make_state

register_ring_spec()

BLOCK = 32
SHAPE = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def ring_spec(window, query_rows, block_size=BLOCK):
    return DraftRingSpec(
        block_size=block_size, sliding_window=window, query_rows=query_rows, **SHAPE
    )


@pytest.mark.parametrize(
    ("window", "queries", "rows"),
    [(32, 1, 32), (33, 1, 64), (31, 2, 64), (18, 8, 32), (19, 8, 64), (2048, 8, 2080)],
)
def test_a_ring_holds_what_a_draft_may_see_and_the_draft(window, queries, rows):
    spec = ring_spec(window, queries)
    assert spec.ring_rows == rows
    assert spec.ring_rows >= window + 2 * queries - 2 > spec.ring_rows - BLOCK
    assert spec.max_memory_usage_bytes(None) == spec.ring_blocks * spec.page_size_bytes


@pytest.mark.parametrize(("window", "queries"), [(32, 1), (33, 4), (5, 8), (100, 5)])
def test_rows_that_a_draft_may_see_never_share_a_place(window, queries):
    spec = ring_spec(window, queries)
    table = [i % spec.ring_blocks for i in range(40)]
    for last in range(300):
        first = last + 1 - (queries - 1) - (window - 1)  # of a query moved back at the end
        needed = range(max(first, 0), last + queries + 1)
        places = {table[p // BLOCK] * BLOCK + p % BLOCK for p in needed}
        assert len(places) == len(needed)


def make_manager(spec, num_blocks=400):
    """vLLM's manager over two latent groups, an indexer group and a ring, bound to the rest."""
    setup = Setup(num_groups=2, num_blocks=num_blocks, num_pages=300)
    groups = [
        KVCacheGroupSpec(["indexer"], indexer_spec()),
        KVCacheGroupSpec(["latent.0"], latent_spec(setup.base_units)),
        KVCacheGroupSpec(["latent.1"], latent_spec(setup.base_units)),
        KVCacheGroupSpec(["draft"], spec),
    ]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=100_000,
        scheduler_block_size=64,
        hash_block_size=16,
        enable_caching=True,
    )
    state = make_state(manager, setup)
    return manager, state, draft_rings(manager)[0]


def run(manager, state, request, chunk):
    """Compute ``chunk`` tokens of a request, lookahead included, as a scheduler does."""
    hit = ()
    if request.num_computed_tokens == 0:
        hit_blocks, num_hit = manager.get_computed_blocks(request)[:2]
        state.on_new_request(request, num_hit)
        hit = (num_hit, hit_blocks)
    blocks = manager.allocate_slots(request, chunk, *hit, num_lookahead_tokens=3)
    assert blocks is not None
    if hit:
        state.on_admitted(request, manager.get_blocks(request.request_id))
        request.num_computed_tokens = hit[0]
    state.bind_scheduled(SimpleNamespace(num_scheduled_tokens={request.request_id: chunk}))
    state.take_commands()
    request.num_computed_tokens += chunk
    return blocks.blocks[3]


@pytest.mark.parametrize("length", [1_000, 12_000])
def test_a_ring_does_not_grow_with_the_context(length):
    manager, state, ring = make_manager(ring_spec(100, 8))
    free = manager.block_pool.get_num_free_blocks()
    request = make_request("a", [random.Random(1).randrange(500) for _ in range(length)])
    sent = []
    while request.num_computed_tokens < length:
        sent += run(manager, state, request, min(96, length - request.num_computed_tokens))
        state.check_integrity()
    table = ring.req_to_blocks["a"]
    assert sent == table, "the workers were sent another table"
    assert len(table) == -(-(length + 3) // BLOCK)
    assert table == [table[i % 4] for i in range(len(table))]
    assert len({block.block_id for block in table}) == ring.ring_blocks == 4
    assert ring.num_rings == 1
    assert ring.num_written_rows() == 4 * BLOCK
    assert ring.take_wraps() == (len(table) - 1) // 4
    assert sorted(ring.take_claimed()) == sorted({block.block_id for block in table})
    assert ring.take_claimed() == []
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == free
    assert ring.num_rings == 0


def test_a_table_behind_a_prefix_hit_starts_with_null_blocks():
    manager, state, ring = make_manager(ring_spec(100, 8))
    tokens = [random.Random(2).randrange(500) for _ in range(300)]
    first = make_request("a", tokens)
    run(manager, state, first, 96)
    run(manager, state, first, 96)
    ring.take_claimed()
    second = make_request("b", tokens)
    run(manager, state, second, 40)
    assert second.num_computed_tokens == 192 + 40
    table = ring.req_to_blocks["b"]
    assert all(block.is_null for block in table[:6])
    assert not any(block.is_null for block in table[6:])
    claimed = ring.take_claimed()
    assert claimed[: len(table) - 6] == [block.block_id for block in table[6:]]
    assert not set(claimed) & {block.block_id for block in ring.req_to_blocks["a"]}
    for request in (first, second):
        manager.free(request)
    assert ring.num_rings == 0


def test_a_ring_that_does_not_fit_keeps_a_request_waiting():
    manager, state, ring = make_manager(ring_spec(2000, 8), num_blocks=60)
    request = make_request("a", range(50))
    state.on_new_request(request, 0)
    assert manager.allocate_slots(request, 50) is None
    assert ring.num_rings == 0


@pytest.mark.parametrize("causal", [True, False])
def test_attention_leaves_out_the_rows_before_a_prefix_hit(causal):
    """vLLM's CPU attention over the shortened sequence, against an explicit mask."""
    ops = pytest.importorskip("vllm._custom_ops")
    torch.manual_seed(0)
    heads, size, window, queries, blocks = 2, 64, 60, 5, 8
    length, valid_from = 150, 3 * BLOCK
    keys, values = torch.randn(2, length, heads, size)
    query = torch.randn(queries, heads, size)
    cache = torch.full((blocks, heads, BLOCK, 2 * size), float("nan"))
    cache[1:] = 0
    table = torch.tensor([[0, 0, 0, 5, 2, 0, 0, 0]], dtype=torch.int32)
    slots = torch.tensor(
        [int(table[0, p // BLOCK]) * BLOCK + p % BLOCK for p in range(valid_from, length)]
    )
    key_cache, value_cache = cache.view(blocks, heads, 2 * BLOCK, size).chunk(2, dim=2)
    isa = "vec"
    ops.cpu_attn_reshape_and_cache(
        keys[valid_from:].contiguous(),
        values[valid_from:].contiguous(),
        key_cache,
        value_cache,
        slots,
        isa,
    )
    shifted, lengths = without_null_blocks(table, torch.tensor([length], dtype=torch.int32), BLOCK)
    assert lengths.tolist() == [length - valid_from]
    start = torch.tensor([0, queries], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size,
        seq_lens=lengths,
        dtype=torch.float32,
        query_start_loc=start,
        causal=causal,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=False,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    out = torch.empty(queries, heads, size)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=out,
        query_start_loc=start,
        seq_lens=lengths,
        scale=size**-0.5,
        causal=causal,
        alibi_slopes=None,
        sliding_window=window,
        block_table=shifted,
        softcap=0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    position = torch.arange(length)
    asked = torch.arange(length - queries, length)[:, None]
    seen = (position > asked - window) & (position >= valid_from)
    seen &= (position <= asked) if causal else (position < asked + window)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * size**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", weights, values))


def test_tables_without_null_blocks_are_left_alone():
    table, lengths = torch.tensor([[3, 1, 0]]).int(), torch.tensor([40]).int()
    assert without_null_blocks(table, lengths, BLOCK)[0] is table
    table = torch.tensor([[0, 3, 9], [2, 0, 9], [0, 0, 0]]).int()
    shifted, lengths = without_null_blocks(table, torch.tensor([50, 20, 0]).int(), BLOCK)
    assert lengths.tolist() == [18, 20, 0]
    assert shifted[:2, 0].tolist() == [3, 2]


def test_rows_behind_counts_from_the_last_accepted_token():
    positions = torch.tensor([7, 8, 9, 10, 0, 1, 2, 40, 0, 0])
    behind = rows_behind(positions, torch.tensor([0, 4, 7, 9]), torch.tensor([1, 0, 1]))
    assert behind[:3].tolist() == [2, 1, 0]
    assert behind[4:8].tolist() == [2, 1, 0, 0]


def test_draft_specs_follow_the_page_plan():
    plan = plan_pages(768, 512, 2 * 2 * 64 * 2, 32)
    assert plan.drafter_block_tokens == 128
    window = WindowSpec(block_size=64, sliding_window=100, **SHAPE)
    ring, full = draft_spec(window, plan, 8), draft_spec(window, plan, None)
    assert isinstance(ring, DraftRingSpec)
    assert (ring.ring_rows, ring.query_rows) == (128, 8)
    assert type(full) is WindowSpec
    everything = draft_spec(FullAttentionSpec(block_size=64, **SHAPE), plan, 8)
    assert type(everything) is FullAttentionSpec
    for spec in (ring, full, everything):
        assert spec.block_size == 128
        assert spec.page_size_bytes == plan.page_bytes == 65536


def test_a_draft_block_divides_the_block_at_whose_borders_prefix_hits_end():
    for latent, indexer, draft in [(1152, 132, 4096), (656, 132, 1024), (768, 512, 768)]:
        plan = plan_pages(latent, indexer, draft, 16)
        assert plan.indexer_block_tokens % plan.drafter_block_tokens == 0
        assert plan.drafter_block_tokens * draft <= plan.page_bytes


def test_an_imposed_window_keeps_the_rest_of_the_attention():
    full = SimpleNamespace(
        layer_types=["full_attention"] * 2, num_hidden_layers=2, dflash_config={"mask_token_id": 1}
    )
    assert attends_to_all(full)
    impose_window(full, 64)
    assert full.layer_types == ["sliding_attention"] * 2
    assert full.dflash_config == {"mask_token_id": 1, "causal": False, "swa_window_size": 64}
    assert not attends_to_all(full)
    impose_window(full, 32)
    assert full.dflash_config["swa_window_size"] == 64


@pytest.mark.parametrize(
    ("is_prefill", "verifies", "phase"),
    [([True, True], False, "prefill"), ([True, False], False, "decode"), ([False], True, "verify")],
)
def test_retrieval_counts_as_what_its_step_does(monkeypatch, is_prefill, verifies, phase):
    times = iter([1.0, 1.25, 7.0, 7.25])
    monkeypatch.setattr(row_counters, "perf_counter", lambda: next(times))
    counters = HostRowCounters(True, [64])
    step = SimpleNamespace(is_prefill=torch.tensor(is_prefill), verifies=verifies)
    for _ in range(2):
        counters.start_clock(0, is_leader=True)
        counters.stop_clock(step, 0, is_leader=True)
    assert counters.take_stats().data["counters"] == {
        f"staging_acquires/{phase}": 2,
        f"retrieval_seconds/{phase}": 0.5,
    }
