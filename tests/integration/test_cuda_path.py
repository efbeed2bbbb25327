"""The CUDA integration under random schedules, on the CPU: see ``cuda_memory``."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cuda_runtime import FakeCudaRuntime
from fake_flash_mla import NAMESPACE, SCHEMAS, decode_fp8_rows
from vllm.forward_context import override_forward_context
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dhisparse.core.commands import StepCommands
from vllm_dhisparse.integration.cuda import backend, flash_mla
from vllm_dhisparse.integration.cuda.backend import CudaBackend
from vllm_dhisparse.integration.cuda.flash_mla import FlashMlaAttention, unavailable_reason
from vllm_dhisparse.integration.cuda.metadata import BatchColumns
from vllm_dhisparse.integration.cuda.self_check import (
    check_attention,
    check_host_pool,
    check_views,
)
from vllm_dhisparse.integration.layers import PlaneAttention
from vllm_dhisparse.integration.messages import StepMetadata

from . import cuda_stand_ins
from .cuda_config import engine_config
from .cuda_memory import CudaMemory, rows_of
from .cuda_stand_ins import PLANE
from .kv_setup import Setup
from .kv_world import World

pytestmark = pytest.mark.usefixtures("flash_mla_operators")
EVENTS = {"hits", "fetches", "entered the cache", "more passes", "preempted", "hit tokens"}
PAGE_TOKENS = {"fp8_ds_mla": 320, "auto": 576}


def make_world(
    monkeypatch, seed, cache_dtype, reason=None, capability=(9, 0), in_place=True, **settings
):
    setup = Setup(
        num_pages=12,
        block_tokens=64,
        page_tokens=PAGE_TOKENS[cache_dtype],
        num_groups=2,
        base_units=1,
        top_k=40,
        staging_rows=128,
        seed=seed,
        **{"num_blocks": 50, "num_index_groups": 2, **settings},
    )
    world = World(setup)
    memory = CudaMemory(setup, monkeypatch, cache_dtype, reason, capability)
    world.worker.memory = memory
    assert {place.span is not None for place in memory.worker.places} == {in_place}
    return world, memory


def run(monkeypatch, seed, cache_dtype, **settings):
    world, memory = make_world(monkeypatch, seed, cache_dtype, **settings)
    events = random.Random(seed)
    world.prefixes = [world.tokens(PAGE_TOKENS[cache_dtype] + 40)] * 4  # longer than a page
    for number in range(36):
        if number % 12 == 11:
            world.preempt_any(0)
        kind = events.random()
        if kind < 0.25:
            prefix_length = events.choice([0, 700])
            world.add_request(0, prefix_length, events.randrange(1, 90), events.randrange(1, 20))
        elif kind < 0.3:
            world.abort(events.randrange(8))
        elif kind < 0.4:
            world.adopt(events.randrange(1, 8), 12)
        world.schedule()
        world.check()
    world.close()
    return world.reached(), memory


@pytest.mark.parametrize("residency", ["fixed", "adaptive"])
@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "auto"])
def test_every_answer_is_that_of_the_rows_that_were_written(monkeypatch, residency, cache_dtype):
    """Laws 1, 2, 4, 8, with hits, misses, passes, prefix hits, preemption and late steps."""
    reached, memory = run(monkeypatch, 0, cache_dtype, lag=1, residency=residency)
    assert {name for name in EVENTS if not reached[name]} == set()
    memory.connector.worker.counters.begin_step()
    counted = memory.connector.get_kv_connector_stats().data["counters"]
    totals = Counter()
    for key, amount in counted.items():
        totals[key.partition("/")[0]] += amount
    assert totals["selected_rows"] == memory.selected_rows
    assert totals["fetched_rows"] == reached["fetches"]
    assert totals["extra_passes"] == reached["more passes"]
    # By one of the two index groups, which has a leader and a follower.
    assert totals["staging_acquires"] >= 4 * reached["steps"] > 0
    assert totals["retrieval_seconds"] > 0
    assert 0 < totals["sampled_hits"] <= reached["hits"]
    usage = memory.connector.worker.counters.take_usage()
    assert sum(usage.cached_ages) >= sum(usage.hit_ages)


@pytest.mark.parametrize(
    ("cache_dtype", "reason", "capability", "in_place"),
    [
        ("fp8_ds_mla", None, (9, 0), True),
        ("fp8_ds_mla", None, (10, 0), False),
        ("auto", None, (10, 0), True),
        ("auto", "not built", (9, 0), True),
        ("fp8_ds_mla", "not built", (9, 0), False),
    ],
    ids=["fp8 Hopper", "fp8 Blackwell", "bfloat16 Blackwell", "own", "own decoded"],
)
def test_a_short_schedule(monkeypatch, cache_dtype, reason, capability, in_place):
    """Also run with Triton's kernels by ``tests/kernels/test_cuda_path_interpreted.py``."""
    if reason is not None and cache_dtype == "fp8_ds_mla" and PLANE != "triton":
        pytest.skip("only Triton's retrieve decodes rows")
    settings = {"residency": "fixed", "num_index_groups": 1, "num_drafts": 1, "lag": 1}
    world, memory = make_world(
        monkeypatch, 3, cache_dtype, reason, capability, in_place, **settings
    )
    for num_new in (230, 30):  # one of them more than its tail and its base share
        world.add_request(0, 0, num_new, max_tokens=8)
    for _ in range(6):
        world.schedule()
    world.close()
    assert {
        name for name in ("fetches", "entered the cache", "hits") if not memory.events[name]
    } == set()


def test_leaders_of_every_indexer_group_take_addresses_from_the_first(monkeypatch):
    """A drafter's small pages split latent and indexer layers into many groups."""
    settings = {"residency": "fixed", "num_indexer_groups": 2, "num_drafts": 3, "lag": 1}
    world, memory = make_world(monkeypatch, 4, "fp8_ds_mla", **settings, num_blocks=80)
    assert [len(names) for names in memory.indexer_groups] == [1, 1]
    world.add_request(0, 0, 230, max_tokens=8)
    for _ in range(5):
        world.schedule()
    world.close()
    assert memory.events["fetches"]
    assert memory.events["hits"]


def layer_of(memory):
    layer = next(iter(memory.layers.values()))
    query = torch.ones(6, 3, 512, dtype=torch.bfloat16), torch.ones(6, 3, 64, dtype=torch.bfloat16)
    return layer, query


def small_memory(monkeypatch, cache_dtype="auto", **settings):
    setup = Setup(num_blocks=20, page_tokens=PAGE_TOKENS[cache_dtype], block_tokens=64, top_k=40)
    setup = replace(setup, staging_rows=128, **settings)
    return CudaMemory(setup, monkeypatch, cache_dtype)


def test_graphs_are_measured_without_a_connector(monkeypatch):
    """vLLM does that with a cache of a few blocks, before it registers the real one."""
    memory = small_memory(monkeypatch)
    layer, query = layer_of(memory)
    layer.impl.path = None
    nothing = torch.full((6,), -1)
    metadata = SimpleNamespace(num_actual_tokens=6, slot_mapping=nothing, schedules={})
    out, _ = layer.impl.forward_mqa(query, layer.kv_cache[:2], metadata, layer)
    assert out.shape == (6, 3, 512)


def test_padding_alone_changes_nothing(monkeypatch):
    """A rank without requests replays a graph whose rows are all padding."""
    memory = small_memory(monkeypatch)
    before = [t.clone() for t in vars(memory.worker.tables).values() if torch.is_tensor(t)]
    layer, query = layer_of(memory)
    metadata = BatchColumns(memory.config, 64, 64, torch.device("cpu")).build(
        common(lengths=[0, 0], seq_lens=[0, 0], slots=[-1] * 6, is_prefilling=[])
    )
    assert (metadata.request_of_token == -1).all()
    address = SimpleNamespace(dhisparse_address=metadata)
    context = SimpleNamespace(attn_metadata=dict.fromkeys(memory.indexers, address))
    with override_forward_context(context):
        layer.impl.forward_mqa(query, layer.kv_cache, metadata, layer)
    after = [t for t in vars(memory.worker.tables).values() if torch.is_tensor(t)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_commands_that_come_twice_or_after_a_missed_step_end_the_engine(monkeypatch):
    connector = small_memory(monkeypatch).connector
    for step in (0, 1):
        connector.bind_connector_metadata(StepMetadata((), StepCommands(step, ())))
    for step in (1, 3):
        with pytest.raises(AssertionError, match=f"step {step} applied after 1"):
            connector.bind_connector_metadata(StepMetadata((), StepCommands(step, ())))


def test_what_a_kernel_finds_impossible_ends_the_engine_once_the_host_knows(monkeypatch):
    memory = small_memory(monkeypatch)
    memory.worker.tables.errors.fill_(0b10)
    memory.connector.build_connector_worker_meta()
    memory.connector.bind_connector_metadata(StepMetadata((), StepCommands(0, ())))
    with pytest.raises(AssertionError, match="a row is written without a host page"):
        memory.connector.build_connector_worker_meta()


def test_the_model_writes_the_rows_itself(monkeypatch):
    layer, _ = layer_of(small_memory(monkeypatch))
    with pytest.raises(NotImplementedError):
        layer.impl.do_kv_cache_update(None)


def test_a_failing_registration_names_the_limits(monkeypatch):
    failing = FakeCudaRuntime(fail_at=1)
    monkeypatch.setattr(cuda_stand_ins, "FakeCudaRuntime", lambda **_: failing)
    with pytest.raises(RuntimeError, match=r"cannot pin .* Lower dhisparse\.host_pool_gib"):
        small_memory(monkeypatch)
    assert not failing.ranges


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "auto"])
@pytest.mark.parametrize("padded", [False, True], ids=["own pages", "beside a drafter"])
def test_resident_rows_are_read_where_vllm_put_them(monkeypatch, cache_dtype, padded):
    """No staging: the block table becomes row numbers of the slab."""
    memory = small_memory(monkeypatch, cache_dtype, residency="resident")
    assert CudaBackend.latent is None
    assert len(next(iter(memory.layers.values())).impl._workspace.staging) == 0
    layer, query = layer_of(memory)
    contents = torch.arange(20 * 64)
    rows = rows_of(contents, 0, cache_dtype).view(20, 64, -1)
    stride = (PAGE_TOKENS[cache_dtype] * 132 // rows.itemsize) if padded else rows[0].numel()
    slab = rows.new_zeros(20, stride).as_strided(rows.shape, (stride, rows.shape[2], 1))
    slab.copy_(rows)
    columns = BatchColumns(memory.config, 64, 64, torch.device("cpu"))
    batch = common([4, 2], [70, 90], slots=[9] * 6, is_prefilling=[False, False])
    batch.block_table_tensor[:] = torch.tensor([[5, 3], [17, 11]])
    metadata = columns.build(batch)
    selected = torch.full((6, 40), -1, dtype=torch.int32)
    selected[:, :3] = torch.tensor([0, 65, 69])
    memory.topk[:6] = selected
    out, _ = layer.impl.forward_mqa(query, slab, metadata, layer)
    physical = torch.tensor([[5 * 64, 3 * 64 + 1, 3 * 64 + 5], [17 * 64, 11 * 64 + 1, 11 * 64 + 5]])
    expected_rows = rows.view(20 * 64, -1)[physical[[0, 0, 0, 0, 1, 1]]]
    visible = selected[:, :3] < metadata.visible[:, None]
    decoded = decode_fp8_rows(expected_rows) if cache_dtype != "auto" else expected_rows.float()
    expected = memory.oracle(torch.cat(query, -1), decoded, visible)
    assert torch.equal(out, expected)
    assert visible.tolist()[0] == [True, True, False]


def common(lengths, seq_lens, slots, is_prefilling):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=len(slots),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(lengths), 2, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        is_prefilling=torch.tensor(is_prefilling, dtype=torch.bool),
    )


def test_columns_come_from_the_lengths_on_the_device():
    """A draft was trimmed on the device, a graph pads requests and tokens."""
    config = engine_config(Setup(num_drafts=3), "auto", "adaptive", 2)
    columns = BatchColumns(config, 64, 64, torch.device("cpu"))
    slots = [10, 11, 20, 30, 31, 32, 33, 34, -1, -1]
    metadata = columns.build(common([2, 1, 5, 0], [50, 7, 5, 0], slots, [False, False, True]))
    assert metadata.request_of_token.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, -1, -1]
    assert metadata.visible.tolist() == [49, 50, 7, 1, 2, 3, 4, 5, 0, 0]
    assert metadata.is_prefill.tolist() == [False, False, True, False]
    assert metadata.verifies.item()
    # An answer that is computed again has no flag, but more tokens than drafts.
    metadata = columns.build(common([5, 1], [60, 8], slots[:6], [False, False]))
    assert metadata.is_prefill.tolist() == [True, False]
    assert not metadata.verifies.item()


def test_pages_come_from_the_smaller_blocks_of_the_indexer():
    config = engine_config(Setup(), "auto", "adaptive", 2)
    columns = BatchColumns(config, 64, 320, torch.device("cpu"))
    batch = common([1, 1], [400, 3], [5, 6], [False, False])
    blocks = torch.tensor([[3, 9], [4, 0]])
    batch.block_table_tensor = (blocks[..., None] * 5 + torch.arange(5)).flatten(1).int()
    first = columns.build(batch).block_table
    assert torch.equal(first, blocks.int())
    assert columns.build(batch).block_table.data_ptr() == first.data_ptr()


def test_flash_mla_is_used_only_as_it_was_recorded(flash_mla_operators, monkeypatch):
    assert unavailable_reason(DeviceCapability(9, 0)) is None
    assert unavailable_reason(DeviceCapability(10, 3)) is None
    assert "compute capability 8.0" in unavailable_reason(DeviceCapability(8, 0))
    changed = flash_mla.DECODE_SCHEMA.replace("float sm_scale", "float scale")
    monkeypatch.setattr(flash_mla, "DECODE_SCHEMA", changed)
    assert "FlashMLA's operator changed" in unavailable_reason(DeviceCapability(9, 0))


def test_the_stand_in_has_the_recorded_schemas():
    schemas = [flash_mla.DECODE_SCHEMA, flash_mla.PREFILL_SCHEMA]
    assert [f"{NAMESPACE}::{name}{rest}" for name, rest in SCHEMAS.items()] == schemas


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_what_there_are_kernels_for(heads, padded):
    assert FlashMlaAttention().query_heads(heads) == padded


def test_more_heads_than_any_kernel_has():
    with pytest.raises(ValueError, match="raise --tensor-parallel-size"):
        FlashMlaAttention().query_heads(129)


def test_without_flash_mla_the_data_plane_attends(monkeypatch, caplog):
    setup = Setup(num_blocks=20, page_tokens=576, block_tokens=64, top_k=40, staging_rows=128)
    memory = CudaMemory(setup, monkeypatch, "auto", reason="not built")
    workspace = next(iter(memory.layers.values())).impl._workspace
    assert isinstance(workspace.attention, PlaneAttention)
    assert workspace.query.shape[1] == 3, "its heads need no padding"


def test_resident_fp8_rows_need_flash_mla(monkeypatch):
    setup = Setup(num_blocks=20, page_tokens=320, block_tokens=64, top_k=40, residency="resident")
    with pytest.raises(ValueError, match="needs FlashMLA"):
        CudaMemory(setup, monkeypatch, "fp8_ds_mla", reason="not built")


def test_a_cache_of_another_layout_is_found_at_start(monkeypatch):
    memory = small_memory(monkeypatch)
    layer, _ = layer_of(memory)
    check_views(memory.layers, memory.worker.sizes)
    layer.kv_cache = layer.kv_cache.contiguous()
    with pytest.raises(RuntimeError, match=r"bytes between blocks .* planned was 76032.*LBNHC"):
        check_views(memory.layers, memory.worker.sizes)


class Wrong:
    """An operator that runs and answers something else."""

    def __init__(self, value):
        self.value = value

    def attend(self, asked, metadata):
        return torch.full_like(asked.query[..., : asked.value_size], self.value)

    def retrieve(self, plan, slab, unit_blocks, host, staging):
        return torch.full_like(staging[None, : len(plan.union)], self.value)


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_attention_that_answers_wrongly_is_found_at_start(monkeypatch, value, dtype):
    query = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
    check_attention(FlashMlaAttention(), query, dtype)
    assert not query.any()
    with pytest.raises(RuntimeError, match="attention by Wrong is off by"):
        check_attention(Wrong(value), query, dtype)


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "auto"])
def test_memory_that_the_device_reads_wrongly_is_found_at_start(monkeypatch, cache_dtype):
    memory = small_memory(monkeypatch, cache_dtype)
    worker = memory.worker
    assert not any(worker.pool.layer(n).any() for n in range(len(memory.layers)))
    worker.ops = Wrong(1)
    with pytest.raises(RuntimeError, match="does not read pinned host memory as the host wrote"):
        check_host_pool(worker)


def test_a_start_that_fails_leaves_nothing_pinned(monkeypatch):
    def fail(*_):
        raise RuntimeError("found at start")

    runtimes = []
    monkeypatch.setattr(backend, "check_attention", fail)
    monkeypatch.setattr(
        cuda_stand_ins,
        "FakeCudaRuntime",
        lambda **_: runtimes.append(FakeCudaRuntime()) or runtimes[0],
    )
    with pytest.raises(RuntimeError, match="found at start"):
        small_memory(monkeypatch)
    assert runtimes[0].log
    assert not runtimes[0].ranges
