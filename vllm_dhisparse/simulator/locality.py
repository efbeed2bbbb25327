"""Synthetic selections with the locality of real ones: spans, recency, changes of subject.

Fitted to selections of a small language model at contexts of 7,168 tokens and 160 selected
rows. The miss curve in units of k keeps its shape at other sizes of the same ratio, so the
generator is used at any context; only what was fitted is known to be like a model's.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.traces import Positions


class Locality(NamedTuple):
    """Kinetics of a request's scores; see ``positions``.

    ``fast``, ``slow``: size and memory in steps of two processes; ``white``: size of the
    noise; ``recency``, ``recent_tokens``: logarithmic preference for new tokens and the
    distance where it starts; ``span_share``, ``span_tokens``: part of each score that the
    tokens of a span share, and their mean number; ``jump_chance``, ``jump_steps``: how
    often the subject changes, and by how many steps the processes move on then.
    """

    fast: tuple[float, float]
    slow: tuple[float, float]
    white: float
    recency: float
    recent_tokens: float
    span_share: float
    span_tokens: float
    jump_chance: float
    jump_steps: float


ORDINARY = Locality((0.068, 2.24), (1.194, 22.0), 0.564, 1.115, 5.61, 0.541, 7.49, 0.087, 46.3)
"""All layers together."""
EASY = Locality((0.253, 1.59), (0.672, 17.7), 0.171, 1.047, 6.79, 0.216, 6.24, 0.121, 65.0)
"""Layers that select much the same rows from step to step."""
HARD = Locality((0.508, 1.78), (0.603, 9.29), 0.606, 0.836, 4.45, 0.744, 9.72, 0.088, 12.8)
"""Layers that do not."""
SCATTERED = HARD._replace(fast=(0.8, 1.5), white=0.8)
"""Poor locality: 35 to 50 % of a selection stays from one step to the next, as published for
DeepSeek-V3.2 on long programs. Chosen for that overlap, not fitted."""
LOCALITIES = {"ordinary": ORDINARY, "easy": EASY, "hard": HARD, "scattered": SCATTERED}


def positions(
    kind: Locality, context: int, steps: int, k: int, random: np.random.Generator
) -> Positions:
    """Return the k tokens of highest score in each step; the context grows by one a step.

    A score is a fixed part, two processes that forget it over a few and over many steps,
    noise, and recency. Neighbours in a span share a part of each. Now and then the subject
    changes, and the processes move on by many steps at once.
    """
    tokens = context + steps
    spans = np.cumsum(random.random(tokens) < 1 / kind.span_tokens)
    own, shared = np.sqrt(1 - kind.span_share), np.sqrt(kind.span_share)

    def draw(kind_of: str = "standard_normal") -> NDArray[np.float32]:
        of_span = getattr(random, kind_of)(size=spans[-1] + 1)
        mixed = shared * of_span[spans] + own * getattr(random, kind_of)(size=tokens)
        return np.asarray(mixed, dtype=np.float32)

    fixed = draw("laplace") / np.sqrt(2)
    fixed[0] = np.inf  # a sink
    processes = [draw(), draw()]
    selected = np.empty((steps, k), dtype=np.int32)
    for step in range(steps):
        length = context + step + 1
        passed = kind.jump_steps if random.random() < kind.jump_chance else 1.0
        score = fixed + kind.white * draw()
        for number, (size, memory) in enumerate((kind.fast, kind.slow)):
            kept = np.exp(-passed / memory)
            processes[number] = kept * processes[number] + np.sqrt(1 - kept**2) * draw()
            score += size * processes[number]
        distance = np.arange(length - 1, -1, -1)
        score = score[:length] - kind.recency * np.log1p(distance / kind.recent_tokens)
        selected[step] = np.argpartition(score, length - k)[length - k :]
    return selected
