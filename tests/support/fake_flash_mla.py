"""FlashMLA's sparse operators on the CPU: the compiled ones' schemas, checks and traps.

The checks are those of the compiled library (vLLM 0.33) and of FlashMLA's public source.
Where that leaves an answer open, this one gives NaN.
"""

import torch

SCHEMAS = {
    "sparse_decode_fwd": (
        "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
        "Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, "
        "Tensor? extra_indices, Tensor? extra_topk_length, int d_v, float sm_scale, "
        "Tensor(c!)? out_=None, bool enable_batch_invariant=False) "
        "-> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
    ),
    "sparse_prefill_fwd": (
        "(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
        "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]"
    ),
}
NAMESPACE = "_flashmla_C"
LATENT, ROPE, ROW = 512, 64, 576
FP8_ROW_BYTES = LATENT + 16 + 2 * ROPE


def define(library):
    """Register both operators for CPU tensors; they live as long as ``library``."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    library.impl("sparse_decode_fwd", sparse_decode_fwd, "CPU")
    library.impl("sparse_prefill_fwd", sparse_prefill_fwd, "CPU")


def decode_fp8_rows(rows):
    """[..., 656] uint8 -> [..., 576] float32."""
    rows = rows.contiguous()
    latent = rows[..., :LATENT].view(torch.float8_e4m3fn).float()
    scales = rows[..., LATENT : LATENT + 16].contiguous().view(torch.float32)
    rope = rows[..., LATENT + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat([latent * scales.repeat_interleave(128, dim=-1), rope], dim=-1)


def sparse_attention(query, rows, valid, scale):
    """The mathematics: [tokens, heads, 576], [tokens, k, 576] float32, [tokens, k] bool.

    Heads that are zero in all tokens pad the others; their answer, which nobody may read, is
    NaN.
    """
    heads = max(1, int((query != 0).any(dim=2).any(dim=0).sum()))
    padding = query[:, heads:]
    assert not padding.any(), "zero heads before others"
    query = query[:, :heads]
    rows = rows.masked_fill(~valid[..., None], 0.0)
    scores = torch.einsum("thd,tkd->thk", query.float(), rows) * scale
    weights = torch.softmax(scores.masked_fill(~valid[:, None], float("-inf")), dim=-1)
    out = torch.einsum("thk,tkd->thd", weights, rows[..., :LATENT]).to(torch.bfloat16)
    return torch.cat([out, torch.full_like(padding[..., :LATENT], float("nan"))], dim=1)


def check_query(query, heads, top_k, multiple):
    assert query.dtype == torch.bfloat16
    assert query.is_contiguous()
    assert query.shape[-1] == ROW
    assert heads in (64, 128), "no kernel for so many heads"
    assert top_k % multiple == 0, f"topk must be a multiple of {multiple}"


def sparse_decode_fwd(
    q,
    kv,
    indices,
    topk_length,
    attn_sink,
    tile_scheduler_metadata,
    num_splits,
    extra_kv,
    extra_indices,
    extra_topk_length,
    d_v,
    sm_scale,
    out_=None,
    enable_batch_invariant=False,
):
    batch, tokens, heads, _ = q.shape
    check_query(q, heads, indices.shape[-1], 64)
    unused = (topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length, out_)
    assert all(argument is None for argument in unused), "SM90 takes none of these for V3.2"
    assert not enable_batch_invariant
    assert d_v == LATENT
    assert kv.dtype == torch.uint8
    assert kv.shape[2:] == (1, FP8_ROW_BYTES)
    assert kv.stride(3) == 1
    assert kv.stride(1) == FP8_ROW_BYTES, "whole blocks must be contiguous"
    assert kv.data_ptr() % 16 == 0
    assert kv.stride(0) % 16 == 0
    assert indices.dtype == torch.int32
    assert indices.is_contiguous()
    assert indices.shape[:2] == (batch, tokens)
    blocks, block_rows = kv.shape[:2]
    assert ((indices >= -1) & (indices < blocks * block_rows)).all(), "an illegal read"
    if (indices < 0).any():
        # A masked entry loads row 0, and 0 x NaN is NaN.
        assert decode_fp8_rows(kv[0, 0, 0])[LATENT:].isfinite().all(), "row 0 is not readable"
    shapes = torch.tensor([batch, tokens, heads, block_rows, indices.shape[-1]])
    if tile_scheduler_metadata is None:
        assert num_splits is None
        tile_scheduler_metadata, num_splits = shapes, torch.ones(1, dtype=torch.int32)
    assert torch.equal(tile_scheduler_metadata, shapes), "a schedule of other shapes"
    index = indices[0].clamp(min=0).long()
    rows = decode_fp8_rows(kv[index // block_rows, index % block_rows, 0])
    out = sparse_attention(q[0], rows, indices[0] >= 0, sm_scale)
    lse = torch.full((batch, heads, tokens), float("nan"))
    return out[None], lse, tile_scheduler_metadata, num_splits


def sparse_prefill_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out_):
    tokens, heads, _ = q.shape
    check_query(q, heads, indices.shape[-1], 128)
    assert all(argument is None for argument in (attn_sink, topk_length, out_))
    assert d_v == LATENT
    assert kv.dtype == torch.bfloat16
    assert kv.shape[1:] == (1, ROW)
    assert kv.stride(2) == 1
    assert kv.data_ptr() % 16 == 0
    assert indices.dtype == torch.int32
    assert indices.is_contiguous()
    assert indices.shape[:2] == (tokens, 1)
    index = indices[:, 0]
    valid = (index >= 0) & (index < kv.shape[0])
    rows = kv[index.clamp(0, kv.shape[0] - 1).long(), 0].float()
    out = sparse_attention(q, rows, valid, sm_scale)
    nothing = torch.full((tokens, heads), float("nan"))
    return [out, nothing, nothing]
