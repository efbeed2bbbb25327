"""The trained model in vLLM: it recalls far pairs, alike in every residency."""

from pathlib import Path

import pytest
import tiny_dsa
import torch
from engine import greedy, running
from tiny_dsa.checkpoint import read_target
from tiny_dsa.data import RECALL, Source, text_pieces
from tiny_dsa.decode import Reader
from tiny_dsa.decode import greedy as read_on
from tiny_dsa.model import SPARSE
from tokenizers import Tokenizer

TARGET = Path(tiny_dsa.__file__).parent / "checkpoints" / "target"
LENGTH = 4080


@pytest.fixture(scope="module")
def asked():
    """Prompts that end with a name, and the number that stood after it far before."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    row = Source(tokenizer, text_pieces()[1], seed=2).questions(LENGTH, 16, 2)
    places = (row.kinds == RECALL).nonzero()[0].tolist()
    return {tuple(row.tokens[:place].tolist()): int(row.tokens[place]) for place in places}


@pytest.fixture(scope="module")
def expected(asked):
    """What the recipe's own forward pass generates."""
    model = read_target(TARGET)
    prompts = [torch.tensor([prompt]) for prompt in asked]
    return [read_on(Reader(model, 1, LENGTH + 16, SPARSE), p, 8)[0].tolist() for p in prompts]


@pytest.mark.parametrize("residency", ["resident", "fixed", "adaptive"])
def test_recall_is_the_same_in_every_residency(asked, expected, residency):
    with running(TARGET, {"residency": residency}) as llm:
        generated = greedy(llm, list(asked), 8)
    assert [tokens[0] for tokens in generated] == list(asked.values())
    assert generated == expected
