"""The recipe of the trained drafters: the backbone, the heads and how acceptance is counted."""

import json

import pytest
import torch
from safetensors import safe_open
from tiny_dsa.acceptance import Verified, calibration, judge, reliability, verify
from tiny_dsa.checkpoint import read_drafter, write_drafter
from tiny_dsa.corpus import GENERATED, PROMPT, TASKS, Corpus, generate
from tiny_dsa.data import Source, make_tokenizer, text_pieces
from tiny_dsa.drafter import DRAFTS, METHODS, Drafter, _attend, drafter_config
from tiny_dsa.initial import initialise
from tiny_dsa.model import SPARSE, DsaModel
from tiny_dsa.propose import _edges, losses, propose
from tiny_dsa.settings import LEADERS, target_config
from tiny_dsa.train_drafter import DrafterTraining, fit_confidence
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv, _score_edges

WINDOW = 128


@pytest.fixture(scope="module")
def target():
    model = DsaModel(target_config(), LEADERS)
    initialise(model, seed=0)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=METHODS)
def drafter(request, target):
    """Random weights, also where training starts from zero."""
    torch.manual_seed(0)
    drafter = Drafter(request.param, target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return drafter.requires_grad_(False)


@pytest.fixture
def sequence(drafter):
    generator = torch.Generator().manual_seed(1)
    size = len(drafter.taps) * drafter.config["hidden_size"]
    features = torch.randn(1, 300, size, generator=generator)
    return features, torch.randint(7, 1024, (1, 300), generator=generator)


def hidden_at(drafter, features, tokens, anchor):
    place = torch.tensor([[anchor]])
    return drafter(features, place, tokens[:, anchor : anchor + 1])[0, 0]


def test_attention_equals_transformers(drafter, sequence):
    features, _ = sequence
    config = drafter.config
    reference_config = Qwen3Config(**config, attn_implementation="eager")
    reference = Qwen3Attention(reference_config, layer_idx=0)
    own = drafter.layers[0].self_attn
    reference.load_state_dict(own.state_dict())
    context = drafter.hidden_norm(drafter.fc(features))
    rows = torch.randn(1, drafter.rows, config["hidden_size"])
    positions = torch.arange(300 + drafter.rows)
    rotary = Qwen3RotaryEmbedding(reference_config)
    both = torch.cat((context, rows), dim=1)
    distance = positions[:, None] - positions
    mask = torch.zeros(distance.shape).masked_fill(
        (distance < 0) | (distance >= WINDOW), torch.finfo(torch.float32).min
    )
    expected, _ = reference(both, rotary(both, positions[None]), mask[None, None])
    where = torch.tensor([[300]])
    table = drafter._rotary(where.unsqueeze(-1) + torch.arange(drafter.rows))
    apart = 300 + torch.arange(drafter.rows)[:, None] - torch.arange(300)
    ours = _attend(
        own,
        rows[:, None],
        table,
        own.keys(context, drafter._rotary(torch.arange(300))),
        (apart < WINDOW)[None, None],
        torch.ones(drafter.rows, drafter.rows).tril().bool(),
    )
    torch.testing.assert_close(ours[0, 0], expected[0, 300:], rtol=1e-4, atol=1e-5)


def test_drafts_depend_on_the_window_and_on_nothing_later(drafter, sequence):
    features, tokens = sequence
    anchor = 200
    expected = hidden_at(drafter, features, tokens, anchor)
    first = anchor - WINDOW + 1  # the oldest row that the first query sees
    for changed, depends in [
        (anchor, False),
        (anchor - 1, True),
        (first, True),
        (first - 1, False),
    ]:
        other = features.clone()
        other[:, changed] += 1
        same = torch.equal(hidden_at(drafter, other, tokens, anchor), expected)
        assert same != depends, changed
    later = tokens.clone()
    later[:, anchor + 1 :] = 9
    assert torch.equal(hidden_at(drafter, features, later, anchor), expected)


def test_blocks_of_a_batch_do_not_see_each_other(drafter, sequence):
    features, tokens = sequence
    anchors = torch.tensor([[150, 153, 290]])
    together = drafter(features, anchors, tokens.gather(1, anchors))[0]
    for ours, anchor in zip(together, anchors[0].tolist(), strict=True):
        alone = hidden_at(drafter, features, tokens, anchor)
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)


def test_convolutions_equal_vllms(target):
    torch.manual_seed(0)
    conv = Drafter("dflash2", target).layers[0].attention_conv
    with torch.no_grad():
        for weight in conv.parameters():
            weight += torch.randn_like(weight)
    hidden = target.config["hidden_size"]
    taps, groups = conv.taps, hidden // conv.group
    blocks = torch.randn(5, DRAFTS + 1, hidden)
    flat = blocks.flatten(0, 1)
    change = conv.kernel_projection(flat).reshape(len(flat), 2, taps, groups)
    for side, kernel in enumerate(conv.kernels(blocks)):
        base = conv.base_kernel[side]
        theirs = _grouped_conv(flat, change[:, side], base, DRAFTS + 1, groups, conv.group, taps)
        ours = conv.convolve(blocks, kernel).flatten(0, 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_selector_equals_vllms(target):
    torch.manual_seed(0)
    drafter = Drafter("dflash2", target)
    selector = drafter.candidate_selector
    with torch.no_grad():
        selector.successor_codebook.normal_()
    top_k = drafter.config["dflash_config"]["selector_top_k"]
    hidden = torch.randn(3, DRAFTS, target.config["hidden_size"])
    anchors = torch.tensor([20, 30, 40])
    unary = target.lm_head(hidden).topk(top_k, dim=-1)
    scores = _score_edges(
        selector.predecessor_codebook,
        selector.successor_codebook,
        unary.indices,
        unary.values,
        selector.hidden_projection(hidden),
        anchors,
        top_k,
    )
    chosen = torch.zeros(3, dtype=torch.long)
    walked, previous = [], [anchors]
    for step in range(DRAFTS):
        edge = scores[torch.arange(3), step, chosen]
        ours = _edges(
            drafter,
            unary.indices[:, step : step + 1],
            unary.values[:, step : step + 1],
            hidden[:, step : step + 1],
            previous[-1][:, None],
        )
        torch.testing.assert_close(ours[:, 0], edge, rtol=1e-4, atol=1e-4)
        chosen = edge.argmax(-1)
        previous.append(unary.indices[torch.arange(3), step, chosen])
        walked.append(previous[-1])
    assert torch.equal(propose(drafter, hidden, anchors), torch.stack(walked, dim=1))


def test_a_drafter_that_is_always_right_is_accepted_whole(drafter, monkeypatch):
    length = PROMPT + GENERATED
    size = len(drafter.taps) * drafter.config["hidden_size"]
    tokens = torch.arange(10, 10 + length)[None]
    corpus = Corpus(tokens, torch.zeros(1, length, size), torch.tensor([1]))

    def right_for(count):
        def propose_some(_, __, anchors):
            return anchors[:, None] + torch.arange(1, DRAFTS + 1) * (torch.arange(DRAFTS) < count)

        return propose_some

    for count in (0, 3, DRAFTS):
        monkeypatch.setattr("tiny_dsa.acceptance.propose", right_for(count))
        verified = verify(drafter, corpus)
        assert len(verified.tasks) == -(-(GENERATED - DRAFTS) // (count + 1))
        assert verified.mean_accepted() == verified.mean_accepted("copy") == count
        assert verified.survival() == [1.0] * count + [0.0] * (DRAFTS - count)


def test_a_draft_is_judged_where_all_before_it_were_accepted():
    judged, right = judge(torch.tensor([0, 2, DRAFTS]))
    assert judged.sum(1).tolist() == [1, 3, DRAFTS]
    assert right.sum(1).tolist() == [0, 2, DRAFTS]
    assert not (right & ~judged).any()


def test_reliability_compares_what_is_said_with_what_is_found():
    said = torch.tensor([0.5, 0.7, 0.9, 0.9, 0.1])
    right = torch.tensor([True, False, True, True, True])
    judged = torch.tensor([True, True, True, True, False])
    found = reliability(said, right, judged, torch.tensor([0, 0, 2, 2, 1]))
    assert found.drafts.tolist() == [2, 0, 2]
    assert [line["said"] for line in found.table()] == pytest.approx([0.6, 0.9])
    assert [line["found"] for line in found.table()] == [0.5, 1.0]
    assert found.error() == pytest.approx(0.1)  # 0.1 in both groups


def test_calibration_of_a_head_that_knows_its_chances():
    torch.manual_seed(0)
    chance = torch.rand(4000, DRAFTS)
    accepted = (torch.rand(4000, DRAFTS) < chance).long().cumprod(-1).sum(-1)
    verified = Verified(torch.zeros(4000, dtype=torch.long), accepted, chance)
    found = calibration(verified)
    assert found["expected_calibration_error"] < 0.03
    assert found["predicted_survival"] == pytest.approx(verified.survival(), abs=0.03)
    assert [line["drafts"] for line in found["by_position"]][:2] == [4000, (accepted > 0).sum()]
    verified.confidence = chance.sqrt()
    assert calibration(verified)["expected_calibration_error"] > 0.1
    verified.confidence = None
    with pytest.raises(ValueError, match="only DSpark"):
        calibration(verified)


def surprise(drafter, corpus):
    """Mean loss of the drafts before the method's own head, in nats."""
    anchors = torch.arange(PROMPT, PROMPT + 64).expand(len(corpus), -1)
    with torch.no_grad():
        hidden = drafter(corpus.features, anchors, corpus.tokens.gather(1, anchors))
    logits = drafter.target[0].lm_head(hidden)
    places = anchors.unsqueeze(-1) + torch.arange(1, DRAFTS + 1)
    wanted = corpus.tokens.gather(1, places.flatten(1))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 2), wanted.flatten()).item()


def test_training_makes_right_drafts_likelier_and_resumes(one_thread, target, tmp_path):
    source = Source(make_tokenizer(), text_pieces()[1], 0)
    corpus = generate(target, source, 64, Drafter("dspark", target).taps, seed=0)
    assert corpus.tokens.shape == (64, PROMPT + GENERATED)
    assert corpus.tasks.tolist().count(TASKS.index("copy")) == 16
    hidden = target(corpus.tokens[:2], SPARSE).hidden
    taps = Drafter("dspark", target).taps
    expected = torch.cat([hidden[tap] for tap in taps], dim=-1)
    torch.testing.assert_close(corpus.features[:2], expected, rtol=1e-3, atol=1e-3)
    held = Corpus(corpus.tokens[:4], corpus.features[:4], corpus.tasks[:4])
    corpora = {"train": corpus, "held": held}
    for method in METHODS:
        whole = DrafterTraining(target, corpora, tmp_path / method, method)
        before = surprise(whole.drafter, held)
        whole._train(0, 8)
        whole.state.step += 1
        whole.state.save()
        resumed = DrafterTraining(target, corpora, tmp_path / method, method)
        assert resumed.state.step == 1
        resumed.run(8)
        whole.run(8)
        for (name, one), other in zip(
            whole.drafter.state_dict().items(), resumed.drafter.state_dict().values(), strict=True
        ):
            assert torch.equal(one, other), name
        assert surprise(whole.drafter, held) < before
        log = (tmp_path / method / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == [8, 8]  # of both runs


def test_the_confidence_head_is_fitted_to_what_is_accepted(target):
    torch.manual_seed(0)
    drafter = Drafter("dspark", target)
    source = Source(make_tokenizer(), text_pieces()[1], 0)
    corpus = generate(target, source, 64, drafter.taps, seed=0)
    for weight in drafter.confidence_head.parameters():
        torch.nn.init.normal_(weight)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    assert calibration(verify(drafter, corpus))["expected_calibration_error"] > 0.1
    fit_confidence(drafter, corpus)
    assert calibration(verify(drafter, corpus))["expected_calibration_error"] < 0.05
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, before[name]) == (not name.startswith("confidence")), name


def test_checkpoint_holds_what_vllm_loads(drafter, target, tmp_path):
    write_drafter(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == drafter_config(drafter.method, target.config)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 6 * 2**20
    again = read_drafter(drafter.method, target, tmp_path)
    for (name, one), other in zip(
        drafter.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_losses_prefer_what_the_target_generates(drafter):
    torch.manual_seed(2)
    hidden = torch.randn(4, DRAFTS, drafter.config["hidden_size"])
    anchors = torch.randint(7, 1024, (4,))
    drafts = propose(drafter, hidden, anchors)
    assert losses(drafter, hidden, anchors, drafts) < losses(
        drafter, hidden, anchors, drafts.roll(1, 0)
    )
