"""The trained drafters in vLLM: the target's own tokens, and drafts that are accepted."""

from pathlib import Path

import pytest
import tiny_dsa
import torch
from engine import counters, greedy, running
from tiny_dsa.checkpoint import read_target
from tiny_dsa.corpus import PROMPT
from tiny_dsa.data import Source, text_pieces
from tiny_dsa.decode import Reader
from tiny_dsa.decode import greedy as read_on
from tiny_dsa.drafter import DRAFTS
from tiny_dsa.model import SPARSE
from tokenizers import Tokenizer

FOLDER = Path(tiny_dsa.__file__).parent / "checkpoints"
TOKENS = 40


@pytest.fixture(scope="module")
def expected():
    """Held-back prompts, and what the recipe's own forward pass generates after them."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "target" / "tokenizer.json"))
    source = Source(tokenizer, text_pieces()[1], seed=0)
    prompts = [source.text(PROMPT).tokens.tolist() for _ in range(3)]
    model = read_target(FOLDER / "target")
    reader = Reader(model, len(prompts), PROMPT + TOKENS, SPARSE)
    return prompts, read_on(reader, torch.tensor(prompts), TOKENS).tolist()


@pytest.mark.parametrize(("name", "method"), [("dspark", "dspark"), ("dflash2", "dflash")])
def test_trained_drafts_are_accepted_and_change_no_token(expected, name, method):
    prompts, tokens = expected
    speculative = {
        "method": method,
        "model": str(FOLDER / name),
        "num_speculative_tokens": DRAFTS,
    }
    options = {"max_model_len": 512, "speculative_config": speculative}
    with running(FOLDER / "target", {}, **options) as llm:
        assert greedy(llm, prompts, TOKENS) == tokens
        counted = counters(llm)
    steps = counted["vllm:spec_decode_num_drafts{}"]
    # Three prompts are few: the drafters' mean is above 1, measured in the model card.
    assert counted["vllm:spec_decode_num_accepted_tokens{}"] >= 0.5 * steps
