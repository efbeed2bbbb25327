"""Synthetic top-k selections with the locality of decoding.

An eighth of each selection are the newest tokens. The others come from a set of rows that
the request works with: half of it in runs of up to 16 tokens, half alone, denser towards
the end of the context. From one query to the next three of ten are replaced, mostly by
rows of that set; one of fifteen of those is new to it.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def _draw(random: np.random.Generator, context: int, count: int) -> NDArray[np.int32]:
    starts = (context * (1 - random.random(count) ** 1.5)).astype(np.int64)
    lengths = np.where(random.random(count) < 0.1, random.integers(8, 17, count), 1)
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.unique(np.minimum(np.repeat(starts, lengths) + offsets, context - 1))


def queries(seed: int, context: int, top_k: int) -> Iterator[NDArray[np.int32]]:
    """Selections of consecutive queries of one request, [top_k] int32 each."""
    random = np.random.default_rng(seed)
    newest = np.arange(context - top_k // 8, context)
    working = random.permutation(_draw(random, context - newest.size, top_k))
    held = working[: top_k - newest.size]
    while True:
        held = held[random.random(held.size) < 0.7]
        fresh = np.setdiff1d(_draw(random, context - newest.size, top_k // 16), working)
        place = random.integers(0, working.size, top_k // 50)
        working[place] = random.permutation(fresh)[: place.size]
        others = random.permutation(np.setdiff1d(working, held))
        held = np.concatenate([held, others[: top_k - newest.size - held.size]])
        yield random.permutation(np.concatenate([held, newest])).astype(np.int32)


def steps(
    seed: int, requests: int, queries_per_step: int, context: int, top_k: int
) -> Iterator[NDArray[np.int32]]:
    """Selections of consecutive steps, [requests * queries_per_step, top_k] int32."""
    streams = [queries(seed + number, context, top_k) for number in range(requests)]
    while True:
        yield np.stack([next(stream) for stream in streams for _ in range(queries_per_step)])
