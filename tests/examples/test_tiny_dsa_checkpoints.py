"""The trained checkpoints: their headline figures on a small sample."""

import json
from pathlib import Path

import pytest
import tiny_dsa
import torch
from tiny_dsa import settings
from tiny_dsa.acceptance import HELD_BACK, calibration, verify
from tiny_dsa.checkpoint import read_drafter, read_target
from tiny_dsa.corpus import generate
from tiny_dsa.data import RECALL, Source, text_pieces
from tiny_dsa.decode import Reader, greedy
from tiny_dsa.drafter import METHODS
from tiny_dsa.evaluate import SEED, recall
from tiny_dsa.model import DENSE, SHUFFLED, SPARSE
from tokenizers import Tokenizer
from transformers_oracle import TransformersOracle

FOLDER = Path(tiny_dsa.__file__).parent / "checkpoints"
TARGET = FOLDER / "target"


@pytest.fixture(scope="module")
def target():
    return read_target(TARGET).requires_grad_(False)


@pytest.fixture
def source():
    """Held-back text."""
    return Source(Tokenizer.from_file(str(TARGET / "tokenizer.json")), text_pieces()[1], SEED)


@pytest.fixture(scope="module")
def continuations(target):
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    held = Source(tokenizer, text_pieces()[1], settings.SEED)
    taps = read_drafter(METHODS[0], target, FOLDER / METHODS[0]).taps
    return generate(target, held, HELD_BACK, taps, settings.SEED)


def test_recall_at_4096_tokens_needs_the_selection(target, source):
    shares = {mode: recall(target, source, mode, 4096, 2) for mode in (DENSE, SPARSE, SHUFFLED)}
    assert shares[SPARSE] >= 0.95
    assert shares[SPARSE] >= shares[DENSE] - 0.01
    assert shares[SHUFFLED] < 0.2


def test_transformers_recalls_the_same(target, source):
    row = source.questions(700, 16, 1)
    assert row.kinds[-1] == RECALL
    prompt = row.tokens[:-1].tolist()
    generated = TransformersOracle(TARGET).greedy(prompt, 8)
    assert generated[0] == row.tokens[-1]
    reader = Reader(target, 1, 710, SPARSE)
    assert generated == greedy(reader, torch.tensor([prompt]), 8)[0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_target_accepts_drafts(target, continuations, method):
    drafter = read_drafter(method, target, FOLDER / method)
    verified = verify(drafter, continuations)
    recorded = json.loads((FOLDER / method / "acceptance.json").read_text())
    # Other versions of Python bring other text.
    assert verified.survival() == pytest.approx(recorded["survival"], abs=0.1)
    assert verified.mean_accepted() + 1 >= 2.0  # as vLLM counts: with the target's own token
    if method == "dspark":
        assert calibration(verified)["expected_calibration_error"] < 0.1


@pytest.mark.parametrize("name", ["target", *METHODS])
def test_checkpoint_is_small(name):
    files = [path for path in (FOLDER / name).iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in files) <= 6 * 10**6
