"""The CPU product. See ``ops`` for the contracts."""

import torch

# Gathered rows of one round. Bounds the scratch of long prefills; a constant, so that
# the matrix products of a token never depend on how the rows are stored.
_ROUND_ROWS = 65_536


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    value_size: int,
) -> torch.Tensor:
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, value_size)
    round_tokens = max(1, _ROUND_ROWS // remap.shape[1])
    for start in range(0, num_tokens, round_tokens):
        part = slice(start, start + round_tokens)
        out[part] = _attend_round(query[part], rows, remap[part], scale, value_size)
    return out


def _attend_round(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    value_size: int,
) -> torch.Tensor:
    missing = remap < 0
    index = remap.clamp(min=0).long()
    page_rows = rows.shape[1]
    picked = rows[index // page_rows, index % page_rows]  # [num_tokens, top_k, row_size]
    # The place behind a -1 may hold anything, and 0 * NaN is NaN.
    picked.masked_fill_(missing[..., None], 0)
    scores = torch.bmm(query, picked.transpose(1, 2)).float().mul_(scale)
    scores.masked_fill_(missing[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    weights.masked_fill_(missing.all(dim=1)[:, None, None], 0)  # softmax of no row is NaN
    return torch.bmm(weights.to(query.dtype), picked[..., :value_size])
