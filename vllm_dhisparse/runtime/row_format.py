"""The row format ``fp8_ds_mla``: 512 e4m3 values, 4 float32 scales, 64 bfloat16 values."""

import torch

ENCODED_BYTES = 656
DECODED_SIZE = 576
_VALUES, _SCALES, _TILE = 512, 4, 128


def is_decoding(slab: torch.Tensor, staging: torch.Tensor) -> bool:
    """Whether staging holds decoded rows of a slab that holds them encoded."""
    is_encoded = slab.dtype == torch.uint8 and slab.shape[-1] == ENCODED_BYTES
    return is_encoded and staging.dtype == torch.bfloat16


def decode(rows: torch.Tensor) -> torch.Tensor:
    """Decode rows.

    Args:
        rows: [n, 656] uint8.

    Returns:
        [n, 576] bfloat16 - values times their scale, rounded to the nearest even; then rope.

    """
    rows = rows.contiguous()
    values = rows[:, :_VALUES].view(torch.float8_e4m3fn).float().view(-1, _SCALES, _TILE)
    ends = _VALUES + 4 * _SCALES
    scales = rows[:, _VALUES:ends].contiguous().view(torch.float32)
    scaled = (values * scales[..., None]).flatten(1).bfloat16()
    return torch.cat([scaled, rows[:, ends:].contiguous().view(torch.bfloat16)], dim=1)
