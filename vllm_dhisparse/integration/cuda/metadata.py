"""What a batch looks like to the layers on CUDA: views of buffers that never move.

vLLM builds metadata on the host before every step, also before it replays a graph. So a
builder computes on the device, without waiting for it, and into buffers whose addresses a
captured graph may keep.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_dhisparse.runtime.plan import Queries


@dataclass
class CudaMetadata(AttentionMetadata):
    """Batch of one step as one KV group sees it, padding of a graph included.

    Attributes:
        request_of_token: [num_actual_tokens] int32 - row of ``block_table``, -1 = padding.
        visible: [num_actual_tokens] int32 - the token may select positions below this.
        is_prefill: [num_reqs] bool - the request computes tokens that it had before.
        verifies: [1] bool - whether any other request brings draft tokens.
        generates: [1] bool - whether there is any other request.
        block_table: [num_reqs, width] int32 - blocks of ``block_size`` tokens.
        slot_mapping: [num_actual_tokens] int64 - ``block * block_size + offset``, negative =
            padding.
        schedules: what attention kernels keep for the layers of this build, by shapes.

    """

    num_actual_tokens: int
    request_of_token: torch.Tensor
    visible: torch.Tensor
    is_prefill: torch.Tensor
    verifies: torch.Tensor
    generates: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    # What vLLM's MLA layer reads to split a batch: all tokens take the sparse path.
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    schedules: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def queries(self) -> Queries:
        """Return who asks, as the row cache wants to know it."""
        return Queries(
            self.request_of_token,
            self.visible,
            self.block_table,
            self.is_prefill,
            # vLLM captures graphs with the longest context, so the bound holds in replays too.
            self.num_reqs * self.max_seq_len,
        )

    def physical_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where positions lie: ``block * block_size + offset``, -1 where there is none.

        Args:
            positions: [num_actual_tokens, n] int32 - positions in each token's request.

        """
        exists = (positions >= 0) & (positions < self.visible[:, None])
        safe = torch.where(exists, positions, 0).long()
        requests = self.request_of_token.clamp(min=0).long()
        blocks = self.block_table[requests[:, None], safe // self.block_size]
        rows = blocks * self.block_size + safe % self.block_size
        return torch.where(exists, rows, -1).to(torch.int32)


class BatchColumns:
    """Derives `CudaMetadata` from vLLM's common metadata, into buffers of its own.

    Args:
        vllm_config: the engine's; bounds the buffers.
        block_size: tokens of a block of vLLM's table.
        page_tokens: tokens of a block of the group; a multiple of ``block_size``, since
            kernels may want smaller blocks than the group has.
        device: of all tensors.

    """

    def __init__(
        self, vllm_config: VllmConfig, block_size: int, page_tokens: int, device: torch.device
    ) -> None:
        assert page_tokens % block_size == 0
        scheduler = vllm_config.scheduler_config
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        tokens = max(scheduler.max_num_batched_tokens, captured)
        requests = max(scheduler.max_num_seqs, captured)
        speculation = vllm_config.speculative_config
        drafts = speculation.num_speculative_tokens if speculation else 0
        self._page_tokens = page_tokens
        self._blocks_per_page = page_tokens // block_size
        self._max_generation_tokens = 1 + drafts
        self._tokens = torch.arange(tokens, dtype=torch.int32, device=device)
        self._request_of_token = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self._visible = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._is_prefill = torch.zeros(requests, dtype=torch.bool, device=device)
        self._verifies = torch.zeros(1, dtype=torch.bool, device=device)
        self._generates = torch.zeros(1, dtype=torch.bool, device=device)
        self._block_table: torch.Tensor | None = None

    def build(self, common: CommonAttentionMetadata) -> CudaMetadata:
        """Fill the buffers for a step; nothing here waits for the device."""
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc[: num_reqs + 1].to(torch.int32)
        seq_lens = common.seq_lens[:num_reqs]
        slots = common.slot_mapping[:num_tokens]
        lengths = starts.diff()
        request_of_token = self._request_of_token[:num_tokens]
        visible = self._visible[:num_tokens]
        if num_reqs and num_tokens:
            tokens = self._tokens[:num_tokens]
            request = torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)
            real = (request < num_reqs) & (slots >= 0)
            request = request.clamp(max=num_reqs - 1).long()
            position = seq_lens[request] - starts[1:][request] + tokens
            request_of_token.copy_(torch.where(real, request, -1))
            visible.copy_(torch.where(real, position + 1, 0))
        is_prefill = self._is_prefill[:num_reqs]
        assert common.is_prefilling is not None
        flags = common.is_prefilling[:num_reqs]  # shorter where a graph pads the requests
        is_prefill[len(flags) :] = False
        if is_prefill.is_cuda and not flags.is_cuda:
            flags = flags.pin_memory()  # a copy from pageable memory may wait for the device
        is_prefill[: len(flags)].copy_(flags, non_blocking=True)
        # vLLM's flag ends with the prompt; an answer is computed again only after it.
        is_prefill |= lengths > self._max_generation_tokens
        self._verifies.copy_((~is_prefill & (lengths > 1)).any()[None])
        self._generates.copy_((~is_prefill & (lengths > 0)).any()[None])
        return CudaMetadata(
            num_actual_tokens=num_tokens,
            request_of_token=request_of_token,
            visible=visible,
            is_prefill=is_prefill,
            verifies=self._verifies,
            generates=self._generates,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=self._pages(common.block_table_tensor[:num_reqs]),
            slot_mapping=slots,
            block_size=self._page_tokens,
            num_reqs=num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_decodes=num_reqs,
            num_decode_tokens=num_tokens,
        )

    def _pages(self, table: torch.Tensor) -> torch.Tensor:
        """Return the table in blocks of the group: a view, or a copy at a fixed address."""
        ratio = self._blocks_per_page
        if ratio == 1:
            return table
        if self._block_table is None:
            width = -(-table.shape[1] // ratio)
            self._block_table = table.new_zeros(len(self._is_prefill), width)
        pages = self._block_table[: len(table)]
        pages.copy_(table[:, ::ratio] // ratio)
        return pages


class CudaMetadataBuilder(AttentionMetadataBuilder[CudaMetadata]):
    """Builds `CudaMetadata` for a latent group."""

    # A batch of equal lengths is a whole graph, any other one is broken at attention.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        block_size = kv_cache_spec.block_size
        self._columns = BatchColumns(vllm_config, block_size, block_size, device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        """Return the longest decode query: all tokens are one batch, whatever their requests."""
        speculation = vllm_config.speculative_config
        return 1 + (speculation.num_speculative_tokens if speculation else 0)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CudaMetadata:
        """Build for a step, or for the capture of a graph."""
        return self._columns.build(common_attn_metadata)
