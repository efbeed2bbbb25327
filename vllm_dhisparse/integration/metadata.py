"""What a batch looks like to the layers of one KV group."""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_dhisparse.runtime.plan import Queries


@dataclass
class DHiSparseMetadata(AttentionMetadata):
    """Batch of one step. All tokens take the sparse path, which vLLM calls decode.

    Attributes:
        query_start_loc: [num_reqs + 1] int64 on the host.
        seq_lens: [num_reqs] int64 on the host, the step's tokens included.
        block_table: [num_reqs, width] int32.
        slot_mapping: [num_actual_tokens] int64 - ``block * block_size + offset``.
        token_request: [num_actual_tokens] int64 - row of ``block_table``.
        token_position: [num_actual_tokens] int64 - position in its request.
        is_prefill: [num_reqs] bool - the request computes tokens that it had before: its
            prompt, or after a preemption also its answer so far.
        verifies: whether any other request brings draft tokens.

    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    token_request: torch.Tensor
    token_position: torch.Tensor
    is_prefill: torch.Tensor
    verifies: bool
    # What vLLM's MLA layer reads to split a batch.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None

    def queries(self) -> Queries:
        """Return who asks, as the row cache wants to know it."""
        return Queries(
            request_of_token=self.token_request.to(torch.int32),
            visible=(self.token_position + 1).to(torch.int32),
            block_table=self.block_table,
            is_prefill=self.is_prefill,
        )

    def physical_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where positions lie: ``block * block_size + offset``, -1 where there is none.

        Args:
            positions: [num_actual_tokens, n] int - positions in each token's request, -1 = none.

        """
        safe = positions.clamp(min=0).long()
        blocks = self.block_table[self.token_request].gather(1, safe // self.block_size)
        rows = blocks * self.block_size + safe % self.block_size
        return torch.where(positions >= 0, rows, -1).to(torch.int32)


class DHiSparseMetadataBuilder(AttentionMetadataBuilder[DHiSparseMetadata]):
    """Builds `DHiSparseMetadata`; the same for latent and indexer layers."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        speculation = vllm_config.speculative_config
        drafts = speculation.num_speculative_tokens if speculation else 0
        self.max_generation_tokens = 1 + drafts

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DHiSparseMetadata:
        """Derive per-token columns from vLLM's per-request ones."""
        common = common_attn_metadata
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc_cpu[: num_reqs + 1].long()
        lengths = starts.diff()
        seq_lens = common.seq_lens[:num_reqs].long()
        token_request = torch.repeat_interleave(torch.arange(num_reqs), lengths)
        assert common.is_prefilling is not None
        # vLLM's flag ends with the prompt; an answer is computed again only after it.
        is_prefill = common.is_prefilling[:num_reqs].cpu() | (lengths > self.max_generation_tokens)
        first_position = seq_lens - lengths - starts[:-1]
        return DHiSparseMetadata(
            num_actual_tokens=num_tokens,
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor[:num_reqs],
            slot_mapping=common.slot_mapping[:num_tokens],
            block_size=self.block_size,
            token_request=token_request,
            token_position=first_position[token_request] + torch.arange(len(token_request)),
            is_prefill=is_prefill,
            verifies=bool((lengths[~is_prefill] > 1).any()),
            num_decodes=num_reqs,
            num_decode_tokens=num_tokens,
        )
