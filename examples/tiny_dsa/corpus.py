"""What drafters learn from: what the target generates, with its residual streams."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiny_dsa.data import Source
from tiny_dsa.decode import Reader, greedy
from tiny_dsa.model import SPARSE, DsaModel

PROMPT = 112
GENERATED = 144
TASKS = ("text", "copy")
_BATCH = 64


@dataclass
class Corpus:
    """Prompts of text or of a copy just begun, and what the target makes of them.

    Attributes:
        tokens: int64 [sequences, PROMPT + GENERATED].
        features: residual streams after the tapped layers, concatenated, float
            [sequences, PROMPT + GENERATED, taps * hidden].
        tasks: index into ``TASKS``, int64 [sequences].
    """

    tokens: Tensor
    features: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def generate(
    target: DsaModel, source: Source, sequences: int, taps: list[int], seed: int
) -> Corpus:
    """Let the target write ``sequences`` continuations, every fourth of a copy.

    Args:
        target: the model that drafters are for.
        source: of the prompts.
        sequences: a multiple of 64.
        taps: layers whose residual streams are kept.
        seed: of the prompts.
    """
    if sequences % _BATCH:
        raise ValueError(f"sequences must be a multiple of {_BATCH}, not {sequences}")
    source.random.seed(seed)
    tasks = torch.arange(sequences) % 4 == 3
    tokens, features = [], []
    for start in range(0, sequences, _BATCH):
        prompts = [
            _copy_prompt(source) if is_copy else source.text(PROMPT).tokens
            for is_copy in tasks[start : start + _BATCH]
        ]
        batch = torch.from_numpy(np.stack(prompts))
        reader = Reader(target, _BATCH, PROMPT + GENERATED, SPARSE)
        batch = torch.cat((batch, greedy(reader, batch, GENERATED)), dim=1)
        reader = Reader(target, _BATCH, PROMPT + GENERATED, SPARSE)
        hidden = reader.feed(batch)
        tokens.append(batch)
        features.append(torch.cat([hidden[layer] for layer in taps], dim=-1))
    return Corpus(torch.cat(tokens), torch.cat(features), tasks.long())


def _copy_prompt(source: Source) -> np.ndarray:
    """A passage, other text, and the first tokens of the passage again."""
    passage, between = source.text(65).tokens, source.text(41).tokens[1:]
    begun = PROMPT - len(passage) - len(between)
    return np.concatenate((passage, between, passage[1 : 1 + begun]))
