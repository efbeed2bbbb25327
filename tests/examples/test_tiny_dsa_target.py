"""The recipe of the trained target: its forward pass, data, checkpoint and stages."""

import json

import numpy as np
import pytest
import torch
from tiny_dsa.checkpoint import read_target, write_target
from tiny_dsa.data import (
    BOS_ID,
    FIRST_NAME,
    FIRST_NUMBER,
    RECALL,
    VOCABULARY_SIZE,
    Source,
    make_tokenizer,
    names,
    numbers,
    text_pieces,
)
from tiny_dsa.decode import Reader, greedy
from tiny_dsa.evaluate import adjacent_overlap, lru_misses, recall
from tiny_dsa.initial import initialise
from tiny_dsa.model import DENSE, SHUFFLED, SPARSE, WARM, DsaModel, _Group
from tiny_dsa.questions import CHECKPOINTS, questions
from tiny_dsa.settings import LEADERS, Stage, target_config
from tiny_dsa.train import Training
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers_oracle import TransformersOracle


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model():
    """Initial weights, and an indexer whose scores are never alike."""
    model = DsaModel(target_config(), LEADERS)
    initialise(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for leader in LEADERS:
            for weight in model.layers[leader].self_attn.indexer.parameters():
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(model, tokenizer, folder)
    return folder


@pytest.fixture
def source(tokenizer):
    return Source(tokenizer, text_pieces()[1], seed=0)


def tokens_of(source, length):
    return torch.from_numpy(source.questions(length, 16, 16).tokens)[None]


@pytest.mark.parametrize("mode", [DENSE, SPARSE])
def test_forward_equals_transformers(model, folder, source, mode):
    oracle = TransformersOracle(folder, dense=mode == DENSE)
    candidates = [tokens_of(source, 100) for _ in range(20)]
    # Rounding must not change a selection: a changed one moves all that follows.
    tokens = max(candidates, key=lambda t: oracle.selection_margin(t[0].tolist()))
    ids = tokens[0].tolist()
    assert oracle.selection_margin(ids) > 1e-4 or mode == DENSE
    with torch.no_grad():
        result = model(tokens, mode)
    for ours, theirs in zip(result.hidden, oracle.layer_outputs(ids), strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-4, atol=1e-4)
    if mode == SPARSE:
        for leader, ours in zip(LEADERS, result.selections, strict=True):
            for mask, theirs in zip(ours[0], oracle.selections(ids)[leader], strict=True):
                assert mask.nonzero()[:, 0].tolist() == theirs[theirs >= 0].tolist()


@pytest.mark.parametrize("mode", [DENSE, SPARSE])
def test_reading_in_pieces_equals_one_pass(model, source, mode):
    tokens = tokens_of(source, 300)
    with torch.no_grad():
        whole = model(tokens, mode).hidden
    reader = Reader(model, 1, 300, mode)
    pieces = [reader.feed(piece) for piece in tokens.split([7, 120, 1, 172], dim=1)]
    for layer, expected in enumerate(whole):
        ours = torch.cat([piece[layer] for piece in pieces], dim=1)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_greedy_equals_transformers(model, folder, source):
    tokens = tokens_of(source, 150)
    ours = greedy(Reader(model, 1, 170, SPARSE), tokens, 20)
    assert ours[0].tolist() == TransformersOracle(folder).greedy(tokens[0].tolist(), 20)


def test_checkpoint_returns_the_same_weights(model, folder, tokenizer, tmp_path):
    again = read_target(folder)
    for (name, ours), theirs in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    write_target(again, tokenizer, tmp_path)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6 * 2**20


def test_tokenizer_keeps_text_and_pairs(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCABULARY_SIZE
    text = "for x in y:\n    é" + "".join(a + b for a, b in zip(names(), numbers(), strict=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    pairs = ids[-2 * len(numbers()) :]
    assert pairs == [
        token for i in range(len(numbers())) for token in (FIRST_NAME + i, FIRST_NUMBER + i)
    ]


def test_recall_is_asked_only_where_the_pair_stood_before(source):
    asked = 0
    for _ in range(40):
        row = source.row(256)
        assert len(row.tokens) == len(row.kinds) == 256
        seen = set()
        for before, token, kind in zip(row.tokens, row.tokens[1:], row.kinds[1:], strict=False):
            if kind == RECALL:
                asked += 1
                assert (before, token) in seen
                assert FIRST_NAME <= before < FIRST_NUMBER <= token
            seen.add((before, token))
    assert asked > 100


def test_questions_lie_at_every_depth(source):
    row = source.questions(1000, 20, 20)
    asked = np.flatnonzero(row.kinds == RECALL)
    assert len(asked) == 20
    depths = [int(np.flatnonzero(row.tokens == row.tokens[i - 1])[0]) for i in asked]
    assert sorted(d // 50 for d in depths)[:: len(depths) - 1] == [0, 18]
    assert len(set(depths)) == 20


def test_a_question_has_its_answer_where_it_says():
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    asked = questions(6, 900)
    assert len({question.name for question in asked}) > 3
    assert asked == questions(6, 900)
    for question in asked:
        assert question.prompt.endswith(question.name)
        tokens = tokenizer.encode(question.prompt).ids
        assert tokens[0] == BOS_ID
        assert 880 < len(tokens) <= 900
        place = tokens.index(tokens[-1])
        assert tokenizer.decode(tokens[place : place + 2]) == question.name + question.answer
        # Pieces of text, written and read again, may join at their ends.
        assert abs(len(tokens) - 1 - place - question.distance) < 20


def test_held_back_text_is_not_trained_on(tokenizer):
    trained, held = text_pieces()
    assert len(held) >= 10
    assert not set(held) & set(trained)


def test_rows_follow_from_the_seed(tokenizer):
    rows = []
    for seed in (3, 3, 4):
        source = Source(tokenizer, text_pieces()[0], seed)
        rows.append(np.stack([source.row(128).tokens for _ in range(5)]))
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_only_the_indexer_learns_from_its_loss(model, source):
    tokens = tokens_of(source, 150)
    for mode in (WARM, SPARSE):
        model.zero_grad(set_to_none=True)
        losses = model(tokens, mode).index_losses
        assert len(losses) == len(LEADERS)
        sum(losses).backward()
        for name, weight in model.named_parameters():
            learns = weight.grad is not None and bool(weight.grad.any())
            assert learns == (".indexer." in name), name
    model.zero_grad(set_to_none=True)


def test_index_loss_is_zero_for_scores_that_equal_the_attention(model, source):
    attention = torch.rand(1, 2, 90, 90).masked_fill(~torch.ones(90, 90).tril().bool(), 0)
    attention = attention / attention.sum(-1, keepdim=True)
    group = _Group(attention.mean(1).log(), WARM, 64, None)
    group.add(attention)
    assert abs(group.loss().item()) < 1e-5
    group = _Group(torch.zeros(1, 90, 90), WARM, 64, None)
    group.add(attention)
    assert group.loss().item() > 0.05


def test_a_stopped_run_goes_on_as_if_it_had_not(one_thread, tmp_path):
    def stages(steps):
        return tuple(Stage(mode, 96, 2, steps, 1e-3, 1e-3) for mode in (DENSE, WARM, SPARSE))

    whole = Training(tmp_path / "whole", stages(10))
    whole.run()
    stopped = Training(tmp_path / "stopped", stages(10))
    stopped.stages = stages(10)[:1]
    stopped.run()
    resumed = Training(tmp_path / "stopped", stages(10))
    assert resumed.state.step == 10
    resumed.run()
    for (name, one), other in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [10, 20, 30]
    assert log[-1]["index_loss_0"] < 13


def test_where_training_starts_recalls_only_with_its_selection(source):
    model = DsaModel(target_config(), LEADERS)
    initialise(model, seed=0)
    assert recall(model, source, SPARSE, 512, 1, needles=16) > 0.5
    assert recall(model, source, SHUFFLED, 512, 1, needles=16) < 0.4


def test_plain_weights_hold_no_circuit(source):
    model = DsaModel(target_config(), LEADERS)
    initialise(model, seed=0, plain=True)
    assert recall(model, source, DENSE, 512, 1, needles=16) < 0.2
    again = DsaModel(target_config(), LEADERS)
    initialise(again, seed=0, plain=True)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_locality_figures():
    steady = np.tile(np.arange(4), (10, 1))
    assert adjacent_overlap(steady) == 1
    assert lru_misses(steady, 5, context=100) == 0
    # The first of four steps is warm-up; then rows 2, 0 and 3 are missing, 5 is a step's own.
    assert lru_misses(np.array([[0, 1], [1, 2], [0, 5], [3, 0]]), 2, context=3) == 3 / 6
    moving = np.arange(40).reshape(10, 4)
    assert adjacent_overlap(moving) == 0
    assert lru_misses(moving, 8, context=100) == 1
