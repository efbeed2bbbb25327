"""From host rows to ranks in the union, and from ranks to where rows lie."""

import triton
import triton.language as tl
from vllm_dhisparse.kernels.bits import rank_of


@triton.jit(do_not_specialize=["rows", "request_of_token", "size"])
def remap_rows(
    rows,  # in, out [num_tokens, top_k] int32: host row becomes rank, -1 stays
    request_of_token,  # [num_tokens] int32
    is_prefill,  # [num_requests] uint8
    union,  # [num_words] int32
    rank_of_word,  # [num_words] int32
    tier,  # [capacity] uint8
    selected,  # in, out [phases, TIERS] int64
    top_k,
    size,
    PHASES: tl.constexpr,
    TIERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn rows into ranks, and count selections by phase and by the tier at each rank."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    row = tl.load(rows + index, mask=inside, other=-1)
    real = row >= 0
    rank = rank_of(union, rank_of_word, row, real)
    tl.store(rows + index, tl.where(real, rank, -1), mask=inside)
    request = tl.load(request_of_token + index // top_k, mask=real, other=0)
    phase = tl.load(is_prefill + request, mask=real, other=0).to(tl.int32)
    kind = phase * TIERS + tl.load(tier + rank, mask=real, other=0)
    for number in tl.static_range(PHASES * TIERS):
        count = tl.sum((real & (kind == number)).to(tl.int32))
        if count > 0:
            tl.atomic_add(selected + number, count.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["size"])
def place_selections(
    remap,  # [num_tokens, top_k] int32: rank in the union, -1 = none
    places,  # [capacity] int32: of each row of the union, see ``retrieve_rows``
    index,  # out [num_tokens, top_k] int32
    size,
    BLOCK: tl.constexpr,
):
    """Turn ranks into places."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < size
    rank = tl.load(remap + number, mask=inside, other=-1)
    place = tl.load(places + rank, mask=rank >= 0, other=-1)
    tl.store(index + number, place, mask=inside)
