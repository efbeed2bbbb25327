"""The meaning of each data-plane operation, in plain torch. See ``ops`` for the contracts."""

import torch


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    value_size: int,
) -> torch.Tensor:
    valid = remap >= 0
    index = remap.clamp(min=0).long()
    page_rows = rows.shape[1]
    picked = rows[index // page_rows, index % page_rows].float()  # [num_tokens, top_k, row_size]
    # The place behind a -1 may hold anything, and 0 * NaN is NaN.
    picked = picked.masked_fill(~valid[..., None], 0.0)
    scores = torch.einsum("thd,tkd->thk", query.float(), picked) * scale
    scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # softmax of no row is NaN
    return torch.einsum("thk,tkd->thd", weights, picked[..., :value_size]).to(query.dtype)
