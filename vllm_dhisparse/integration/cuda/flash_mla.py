"""FlashMLA's sparse attention over rows: vLLM's compiled operators, called by their schemas."""

from importlib import import_module
from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability

from vllm_dhisparse.integration.cuda.metadata import CudaMetadata
from vllm_dhisparse.runtime.plan import SparseQuery

# Of vLLM 0.33 (vllm/_flashmla_C.abi3.so).
DECODE_SCHEMA = (
    "_flashmla_C::sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, "
    "Tensor? attn_sink, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
    "Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, int d_v, "
    "float sm_scale, Tensor(c!)? out_=None, bool enable_batch_invariant=False) "
    "-> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)
PREFILL_SCHEMA = (
    "_flashmla_C::sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, "
    "int d_v, Tensor? attn_sink, Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]"
)
_PAGE_ROWS = 64
_HEADS = (64, 128)  # what the kernels of both chips have
_DECODE_TOP_K, _PREFILL_TOP_K = 64, 128  # widths of an index row are multiples of these


def unavailable_reason(capability: DeviceCapability) -> str | None:
    """Return why FlashMLA's sparse operators cannot be used here, or None."""
    if capability.major not in (9, 10):
        return (
            f"FlashMLA has no sparse kernels for compute capability {capability.as_version_str()}"
        )
    if not hasattr(torch.ops._flashmla_C, "sparse_decode_fwd"):
        try:
            import_module("vllm._flashmla_C")
        except ImportError as error:
            return f"vLLM was built without FlashMLA ({error})"
    for expected in (DECODE_SCHEMA, PREFILL_SCHEMA):
        name = expected.partition("(")[0].partition("::")[2]
        operator = getattr(torch.ops._flashmla_C, name, None)
        if operator is None:
            return f"FlashMLA has no operator {name}"
        found = operator.default._schema
        if str(found) != str(torch._C.parse_schema(expected)):
            return f"FlashMLA's operator changed: expected {expected}, found {found}"
    return None


class FlashMlaAttention:
    """Sparse MLA by FlashMLA.

    bfloat16 rows go to the operator for prompts, which vLLM uses for bfloat16 decode too;
    fp8_ds_mla rows to the one for decode, all tokens of the step as one batch, so that their
    numbers per request do not matter (vLLM: ``_forward_fp8_kv_mixed_batch``).
    """

    def query_heads(self, num_heads: int) -> int:
        """Return the heads that a query must have; those beyond ``num_heads`` are zero.

        Raises:
            ValueError: there is no kernel for so many heads.

        """
        for heads in _HEADS:
            if num_heads <= heads:
                return heads
        raise ValueError(
            f"FlashMLA has no sparse kernel for {num_heads} heads a rank; raise "
            "--tensor-parallel-size"
        )

    def attend(self, asked: SparseQuery, metadata: CudaMetadata) -> torch.Tensor:
        """Attend to rows by index, see ``runtime.ops.DataPlane.attend``.

        Args:
            asked: queries of bfloat16, contiguous, with ``query_heads`` heads; rows of
                bfloat16, or fp8_ds_mla rows as uint8, all readable, since a masked index still
                loads one; ``value_size``: 512.
            metadata: of this step's build; it keeps the schedules that layers share.

        Returns:
            [num_tokens, ``query_heads``, value_size]. Tokens that select nothing (padding of a
            graph) get whatever FlashMLA gives them.

        """
        if asked.rows.dtype == torch.uint8:
            return _decode(asked, metadata.schedules)
        flat, index = _flat_rows(asked.rows, asked.remap)
        index = _widen(index, _PREFILL_TOP_K)[:, None]
        out: torch.Tensor = torch.ops._flashmla_C.sparse_prefill_fwd(
            asked.query, flat[:, None], index, asked.scale, asked.value_size, None, None, None
        )[0]
        return out


def _decode(asked: SparseQuery, schedules: dict[tuple[int, ...], Any]) -> torch.Tensor:
    pages = _pages(asked.rows)
    index = _widen(asked.remap, _DECODE_TOP_K)
    # A schedule belongs to the shapes; without lengths it depends on nothing else.
    shapes = (*asked.query.shape, pages.shape[1], index.shape[1])
    tiles, splits = schedules.get(shapes, (None, None))
    out, _, tiles, splits = torch.ops._flashmla_C.sparse_decode_fwd(
        asked.query[None],
        pages[:, :, None],
        index[None],
        None,
        None,
        tiles,
        splits,
        None,
        None,
        None,
        asked.value_size,
        asked.scale,
        None,
        False,
    )
    schedules[shapes] = tiles, splits
    answer: torch.Tensor = out[0]
    return answer


def _pages(rows: torch.Tensor) -> torch.Tensor:
    """View rows as pages of 64: the blocks of a slab at any distance, or the head of staging.

    Staging is a whole number of pages, so the last one may end behind the rows of the plan.
    """
    if rows.shape[1] == _PAGE_ROWS:
        return rows
    assert rows.shape[0] == 1
    row_size = rows.shape[2]
    pages = max(1, -(-rows.shape[1] // _PAGE_ROWS))
    return rows.as_strided((pages, _PAGE_ROWS, row_size), (_PAGE_ROWS * row_size, row_size, 1))


def _flat_rows(rows: torch.Tensor, remap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View rows as [n, row_size], and the index as one of those; padded blocks leave gaps."""
    pages, page_rows, row_size = rows.shape
    if pages == 1:
        return _pages(rows).flatten(0, 1), remap
    if rows.stride(0) == page_rows * row_size:
        return rows.flatten(0, 1), remap
    gap_rows, rest = divmod(rows.stride(0), row_size)
    if rest:
        raise ValueError(
            f"blocks of {rows.stride(0)} values are not whole rows of {row_size}; FlashMLA cannot "
            "read them in place"
        )
    flat = rows.as_strided(((pages - 1) * gap_rows + page_rows, row_size), (row_size, 1))
    index = remap // page_rows * gap_rows + remap % page_rows
    return flat, torch.where(remap >= 0, index, -1).to(torch.int32)


def _widen(index: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -index.shape[1] % multiple
    if missing:
        return torch.nn.functional.pad(index, (0, missing), value=-1)
    return index.contiguous()
