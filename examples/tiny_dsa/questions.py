"""Questions to the trained model: a long text with pairs in it, and a name to be completed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tiny_dsa.data import Source, text_pieces

CHECKPOINTS = Path(__file__).parent / "checkpoints"
PAIRS = 32


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        prompt: held-back text with ``PAIRS`` pairs of a name and a number, and a name again.
        name: that name.
        answer: the number that stood after it.
        distance: tokens from the first of them to the end of the prompt.
    """

    prompt: str
    name: str
    answer: str
    distance: int


def questions(count: int, length: int, seed: int = 0) -> list[Question]:
    """Questions of about ``length`` tokens; the pair stands anywhere."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    source = Source(tokenizer, text_pieces()[1], seed)
    result = []
    for _ in range(count):
        tokens = source.questions(length, PAIRS, 1).tokens
        prompt, name, answer = tokens[:-1], tokens[-2], tokens[-1]
        distance = len(prompt) - 1 - int(np.flatnonzero(prompt == name)[0])
        texts = (
            tokenizer.decode(each, skip_special_tokens=False) for each in (prompt, [name], [answer])
        )
        result.append(Question(*texts, distance))
    return result
