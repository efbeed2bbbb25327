"""A worker on the whole CUDA path, with tensors on the CPU and vLLM's calls in vLLM's order.

What is not real here: the driver under CuPy, FlashMLA's two operators, and the model's own
kernels, which write rows and select positions.
"""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from fake_flash_mla import LATENT, ROW, decode_fp8_rows, sparse_attention
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SparseCacheRole,
)

from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.integration.connector import DHiSparseConnector
from vllm_dhisparse.integration.cuda import backend
from vllm_dhisparse.integration.cuda.address import address_of
from vllm_dhisparse.integration.messages import StepMetadata
from vllm_dhisparse.runtime.tables import NO_PAGE, UNIT_ROWS

from .cuda_config import MAX_TOKENS, engine_config
from .cuda_stand_ins import Arena, IndexerCache, arrange
from .row_memory import check_held, select_positions

KERNEL_BLOCK = 64  # of vLLM's indexer
HEADS = 3
SCALE = 0.07


def rows_of(contents, layer, cache_dtype):
    """Rows of a layer, finite and exact: [n, row_size] of [n] int64."""
    places = torch.arange(ROW, dtype=torch.int64)
    mixed = (contents[:, None] * (2 * layer + 3) + places * 7919) >> (places % 17)
    latent, rope = mixed[:, :LATENT], mixed[:, LATENT:]
    rope = ((rope % 31 - 15).float() / 8).to(torch.bfloat16)
    if cache_dtype == "auto":
        return torch.cat([((latent % 61 - 30).float() / 16).to(torch.bfloat16), rope], dim=1)
    sign = (latent >> 3 & 1) << 7
    codes = (latent % 0x60 | sign).to(torch.uint8)  # no NaN
    scales = torch.exp2((mixed[:, :4] % 5 - 7).float())
    return torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)


class CudaMemory:
    """In the place of ``row_memory.RowMemory``: the same steps through the CUDA path."""

    def __init__(
        self, setup, monkeypatch, cache_dtype="fp8_ds_mla", reason=None, capability=(9, 0)
    ):
        self.cache_dtype, self.top_k = cache_dtype, setup.top_k
        self.is_exact = reason is None  # FlashMLA's stand-in sums as the oracle does
        self.padding = setup.num_drafts  # rows and tokens that a graph adds
        num_layers = max(setup.num_groups, 2 * setup.num_index_groups)
        self.config = engine_config(setup, cache_dtype, setup.residency, num_layers)
        self.arena = Arena(staging_first=setup.seed % 2 == 0)
        self.runtime = arrange(
            monkeypatch, self.config, reason, arena=self.arena, capability=capability
        )
        self.random = torch.Generator().manual_seed(setup.seed)
        self.events = Counter()
        self.selected_rows = 0
        self.addresses = None
        self.guard = lambda *_: nullcontext()  # around what a graph would hold
        self._build_model(setup, num_layers)
        self._plan_cache(setup)
        self.connector = DHiSparseConnector(
            self.config, KVConnectorRole.WORKER, self.kv_cache_config
        )
        self.connector.register_kv_caches(dict.fromkeys(self.layers, torch.empty(0)))
        self.worker = self.connector.worker.state

    def _build_model(self, setup, num_layers):
        self.topk = torch.full((MAX_TOKENS, setup.top_k), -1, dtype=torch.int32)
        groups = [n * setup.num_index_groups // num_layers for n in range(num_layers)]
        self.index_groups = groups
        self.indexers, self.layers = {}, {}
        for number in range(num_layers):
            indexer = None
            if groups.index(groups[number]) == number:
                indexer = SimpleNamespace(k_cache=IndexerCache(), topk_indices_buffer=self.topk)
                self.indexers[f"model.layers.{number}.indexer.k_cache"] = indexer.k_cache
            impl = backend.CudaImpl(
                HEADS,
                ROW,
                SCALE,
                1,
                None,
                None,
                self.cache_dtype,
                None,
                "decoder",
                None,
                kv_lora_rank=LATENT,
                indexer=indexer,
                topk_indices_buffer=self.topk,
                index_group_builder=None,
            )
            name = f"model.layers.{number}.self_attn.attn"
            self.layers[name] = SimpleNamespace(impl=impl)
        self.config.compilation_config.static_forward_context.update(self.layers)

    def _plan_cache(self, setup):
        """Slabs as vLLM lays them out: one layer of each group at the same bytes."""
        stock = MLAAttentionSpec(
            block_size=UNIT_ROWS,
            num_kv_heads=1,
            head_size=ROW,
            dtype=torch.uint8 if self.cache_dtype == "fp8_ds_mla" else torch.bfloat16,
            state_content_bytes=656 if self.cache_dtype == "fp8_ds_mla" else None,
            max_tp_shards=1,
        )
        resident = setup.residency == "resident"
        spec = backend.CudaBackend.customize_spec(stock)
        names, num_latent = list(self.layers), setup.num_groups
        self.latent_groups = [names[group::num_latent] for group in range(num_latent)]
        keys = MLAAttentionSpec(
            block_size=setup.page_tokens,
            num_kv_heads=1,
            head_size=132,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
        )
        page = spec.page_size_bytes
        assert resident or page == keys.page_size_bytes, "pages of the two kinds differ"
        groups = [KVCacheGroupSpec(names, spec) for names in self.latent_groups]
        count = setup.num_indexer_groups
        self.indexer_groups = [list(self.indexers)[group::count] for group in range(count)]
        groups += [KVCacheGroupSpec(names, keys) for names in self.indexer_groups]
        num_slabs = -(-len(names) // num_latent)
        self.bytes = self.arena.cache(num_slabs * setup.num_blocks * page)
        self.bytes = self.bytes.fill_(0xFF).view(num_slabs, setup.num_blocks, page)
        row_size = spec.unpadded_page_size_bytes // UNIT_ROWS // stock.dtype.itemsize
        shape = setup.num_blocks, UNIT_ROWS, row_size
        for number, layer in enumerate(self.layers.values()):
            slab = self.bytes[number // num_latent].view(stock.dtype)
            layer.kv_cache = slab.as_strided(
                shape, (slab.stride(0), row_size, 1), slab.storage_offset()
            )
        size = self.bytes.numel()
        stride = setup.num_blocks * page
        tensor = KVCacheTensor(size=size, layers=names, layer_stride=stride, block_stride=page)
        self.kv_cache_config = KVCacheConfig(setup.num_blocks, [tensor], groups)
        device = torch.device("cpu")
        self.builders = [
            backend.CudaBackend.get_builder_cls()(spec, names, self.config, device)
            for names in self.latent_groups
        ]
        builder_class = next(iter(self.indexers.values())).get_attn_backend().get_builder_cls()
        self.address_builder = builder_class(
            keys.copy_with_new_block_size(KERNEL_BLOCK),
            self.indexer_groups[0],
            self.config,
            device,
            block_table_width=1,
        )

    def apply(self, commands, units, pages):
        """Apply a step's commands; ``units`` and ``pages`` are what the scheduler then held."""
        self.connector.bind_connector_metadata(StepMetadata((), commands))
        check_held(self.worker.tables, units, pages)

    def run(self, batch):
        """Build metadata, write, select and attend, layer by layer."""
        self.bytes[:, batch.indexer_blocks] = 0xFF  # indexer keys lie in the same memory
        metadata = self.metadata(batch)
        num_tokens, total = len(batch.contents), metadata[0].num_actual_tokens
        selected = None
        for number, layer in enumerate(self.layers.values()):
            group = number % len(self.latent_groups)
            slots = batch.latent_slots[group]
            rows = rows_of(batch.contents, number, self.cache_dtype)
            layer.kv_cache[slots // UNIT_ROWS, slots % UNIT_ROWS] = rows
            if layer.impl.is_leader:
                selected = select_positions(batch.queries, self.top_k, self.random)
                self.topk[:num_tokens] = selected
                self.topk[num_tokens:total] = 7  # what padding leaves there is no selection
            query = torch.randn(2, total, HEADS, ROW, generator=self.random).to(torch.bfloat16)
            latent = query[0].transpose(0, 1).contiguous().transpose(0, 1)[..., :LATENT]
            context = override_forward_context(SimpleNamespace(attn_metadata=self.by_layer))
            with context, self.guard(number, metadata[group]):
                layer.impl.record_logical_topk_ready()
                layer.impl.prepare_for_batch(metadata[group])
                out, _ = layer.impl.forward_mqa(
                    (latent, query[1][..., LATENT:]), layer.kv_cache, metadata[group], layer
                )
            assert out.shape == (total, HEADS, LATENT)
            query = torch.cat([latent, query[1][..., LATENT:]], dim=-1)
            self.compare(number, batch, selected, query[:num_tokens], out[:num_tokens])
            self.count(number, layer)
        self.events["steps"] += 1
        self.check(batch)

    def metadata(self, batch):
        """Build for every group, with the rows and tokens that pad a graph."""
        queries = batch.queries
        num_reqs, num_tokens = len(batch.lengths), len(batch.contents)
        lengths = torch.bincount(queries.request_of_token.long(), minlength=num_reqs)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        starts = torch.nn.functional.pad(starts, (0, self.padding), value=num_tokens).int()
        pad = self.padding
        reqs, total = num_reqs + pad, num_tokens + 2 * pad

        def common(table, slots):
            return CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.nn.functional.pad(batch.lengths.int(), (0, pad)),
                num_reqs=reqs,
                num_actual_tokens=total,
                max_query_len=int(lengths.max()),
                max_seq_len=int(batch.lengths.max()),
                block_table_tensor=torch.nn.functional.pad(table.int(), (0, 0, 0, pad)),
                slot_mapping=torch.nn.functional.pad(slots, (0, 2 * pad), value=-1),
                is_prefilling=queries.is_prefill,
            )

        ratio = self.worker.tables.sizes.page_rows // KERNEL_BLOCK
        kernel_blocks = queries.block_table[..., None] * ratio + torch.arange(ratio)
        table = torch.zeros(num_reqs, 64 * ratio, dtype=torch.int64)
        table[:, : kernel_blocks[0].numel()] = kernel_blocks.flatten(1)
        address = self.address_builder.build(0, common(table, batch.address_slots))
        latent_table = torch.zeros(num_reqs, 1)  # nothing reads it
        built = [
            builder.build(0, common(latent_table, slots))
            for builder, slots in zip(self.builders, batch.latent_slots, strict=True)
        ]
        self.by_layer = dict.fromkeys(self.indexer_groups[0], address)  # no other has a page
        for names, group in zip(self.latent_groups, built, strict=True):
            self.by_layer |= dict.fromkeys(names, group)
        self.check_addresses([address_of(address), *built])
        return built

    def check_addresses(self, metadata):
        """What a captured graph would read lies where it lay in the first step."""
        worker = self.worker
        tables = [v for v in vars(worker.tables).values() if isinstance(v, torch.Tensor)]
        views = [worker.staging, *tables]
        for batch in metadata:
            views += [batch.request_of_token, batch.visible, batch.is_prefill, batch.verifies]
        views.append(metadata[0].block_table)
        addresses = [view.data_ptr() for view in views]
        assert self.addresses in (None, addresses), "a tensor of the graph has moved"
        self.addresses = addresses

    def compare(self, number, batch, selected, query, out):
        """The answer is, to the bit, that of the rows that the requests wrote."""
        visible = batch.queries.visible[:, None]
        valid = (selected >= 0) & (selected < visible)
        position = torch.where(valid, selected, 0).long()
        contents = batch.history[batch.queries.request_of_token[:, None].long(), position]
        rows = rows_of(contents.flatten(), number, self.cache_dtype)
        rows = rows.view(*contents.shape, -1)
        rows = decode_fp8_rows(rows) if self.cache_dtype == "fp8_ds_mla" else rows.float()
        expected = self.oracle(query, rows, valid)
        some = valid.any(dim=1)
        if self.is_exact:
            assert torch.equal(out[some], expected[some]), f"layer {number} reads other rows"
        else:
            error = (out[some].float() - expected[some].float()).abs()
            assert (error <= 2e-2 * expected[some].float().abs().max()).all()
        if self.layers[list(self.layers)[number]].impl.is_leader:
            self.selected_rows += int(valid.sum())

    def oracle(self, query, rows, valid):
        """As wide as the kernel's index and with its heads, so that the sums are the same."""
        multiple = 64 if self.cache_dtype == "fp8_ds_mla" else 128
        missing = -rows.shape[1] % multiple
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        valid = torch.nn.functional.pad(valid, (0, missing))
        query = torch.nn.functional.pad(query, (0, 0, 0, 64 - HEADS))
        return sparse_attention(query, rows, valid, SCALE)[:, :HEADS]

    def count(self, number, layer):
        if layer.impl.is_leader:
            plans = self.worker.resolution.plans
            fetches = sum(int(plan.fetch.sum()) for plan in plans)
            entered = sum(int((plan.fetch & (plan.slot >= 0)).sum()) for plan in plans)
            hits = sum(int((~plan.fetch).sum()) for plan in plans)
            self.events.update(
                {
                    "fetches": fetches,
                    "entered the cache": entered,
                    "hits": hits,
                    "more passes": len(plans) - 1,
                }
            )

    def check(self, batch):
        """Host rows are those of each request, in every layer."""
        tables, length = self.worker.tables, batch.history.shape[1]
        tables.check_integrity()
        request, position = (torch.arange(length) < batch.lengths[:, None]).nonzero().unbind(1)
        page_rows = tables.sizes.page_rows
        blocks = batch.queries.block_table[request, position // page_rows].long()
        written = tables.page_of_block[blocks].long() * page_rows + position % page_rows
        contents = batch.history[request, position]
        for number in range(len(self.layers)):
            at_home = self.worker.pool.layer(number).flatten(0, 1)
            expected = rows_of(contents, number, self.cache_dtype)
            assert torch.equal(at_home[written], expected), "host rows differ"

    def check_empty(self):
        """Nothing is left when everything has ended."""
        tables = self.worker.tables
        assert (tables.page_of_block == NO_PAGE).all()
        assert (tables.unit_state == UnitState.DEAD).all()
        tables.check_integrity()
        self.connector.shutdown()
        assert not self.runtime.ranges, "memory stays pinned"
