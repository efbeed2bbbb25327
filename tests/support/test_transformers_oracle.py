import pytest
import torch
import transformers_oracle
from make_tiny_dsa import TinyDsa, write
from safetensors.torch import load_file, save_file
from transformers_oracle import TransformersOracle

GLM = TinyDsa(layers=4, leaders=2, index_topk=16, max_model_len=2048)
DEEPSEEK = TinyDsa(architecture="deepseek_v32", layers=2, index_topk=16, max_model_len=2048)
PROMPT = torch.randint(7, 512, (90,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=[GLM, DEEPSEEK], ids=lambda s: s.architecture)
def settings(request):
    return request.param


@pytest.fixture(scope="module")
def directory(settings, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write(settings, directory)
    return directory


@pytest.fixture(scope="module")
def oracle(directory):
    return TransformersOracle(directory)


def test_selections_are_causal_ascending_and_full(oracle, settings):
    selections = oracle.selections(PROMPT)
    assert tuple(selections) == oracle.leader_layers == settings.leader_layers
    for selected in selections.values():
        assert selected.shape == (len(PROMPT), 16)
        for position, row in enumerate(selected.tolist()):
            visible = [p for p in row if p >= 0]
            assert len(visible) == min(position + 1, 16)
            assert visible == sorted(set(visible))
            assert max(visible) <= position


def test_the_margin_is_positive_and_infinite_where_all_is_selected(oracle):
    assert oracle.selection_margin(PROMPT[:16]) == float("inf")
    assert 0 < oracle.selection_margin(PROMPT) <= oracle.selection_margin(PROMPT[:40])


def test_greedy_follows_the_log_probabilities(oracle):
    generated = oracle.greedy(PROMPT, 12)
    logprobs = oracle.logprobs([*PROMPT, *generated])
    assert logprobs[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist() == generated
    torch.testing.assert_close(logprobs.exp().sum(dim=-1), torch.ones(len(logprobs)))


def test_chunks_do_not_change_the_result(oracle, monkeypatch):
    whole, selections = oracle.layer_outputs(PROMPT), oracle.selections(PROMPT)
    monkeypatch.setattr(transformers_oracle, "CHUNK_TOKENS", 7)
    for chunked, expected in zip(oracle.layer_outputs(PROMPT), whole, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-4)
    for layer, chunked in oracle.selections(PROMPT).items():
        assert torch.equal(chunked, selections[layer])


def test_the_last_layer_output_gives_the_log_probabilities(oracle, directory, settings):
    weights = load_file(directory / "model.safetensors")
    outputs = oracle.layer_outputs(PROMPT)
    assert [tuple(o.shape) for o in outputs] == [(len(PROMPT), 128)] * settings.layers
    mean_square = outputs[-1].square().mean(dim=-1, keepdim=True)
    hidden = outputs[-1] * torch.rsqrt(mean_square + 1e-6) * weights["model.norm.weight"]
    expected = (hidden @ weights["lm_head.weight"].T).log_softmax(dim=-1)
    torch.testing.assert_close(oracle.logprobs(PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_dense_equals_sparse_until_the_context_exceeds_the_top_k(oracle, directory):
    dense = TransformersOracle(directory, dense=True)
    difference = (dense.logprobs(PROMPT) - oracle.logprobs(PROMPT)).abs().amax(dim=-1)
    assert difference[:16].max() < 1e-4
    assert difference[16:].mean() > 0.1
    assert all((s[-1] >= 0).all() for s in dense.selections(PROMPT).values())


def test_of_equal_index_scores_the_lowest_positions_are_selected(directory, tmp_path):
    def without_index_scores(weights):
        return {
            name: torch.zeros_like(w) if "indexer.weights_proj" in name else w
            for name, w in weights.items()
        }

    _copy(directory, tmp_path, without_index_scores)
    for selected in TransformersOracle(tmp_path).selections(PROMPT).values():
        assert torch.equal(selected[16:], torch.arange(16).expand(len(PROMPT) - 16, 16))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.gate.weight"])
def test_a_checkpoint_that_does_not_fit_is_refused(directory, tmp_path, name):
    def renamed(weights):
        return {("model.other" if n == name else n): w for n, w in weights.items()}

    _copy(directory, tmp_path, renamed)
    with pytest.raises(RuntimeError, match="does not fit the model"):
        TransformersOracle(tmp_path)


def test_a_bfloat16_checkpoint_is_computed_in_float32(tmp_path):
    write(TinyDsa(layers=2, index_topk=16, dtype="bfloat16"), tmp_path)
    oracle = TransformersOracle(tmp_path)
    assert {output.dtype for output in oracle.layer_outputs(PROMPT)} == {torch.float32}


def _copy(source, target, change):
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = change(load_file(source / "model.safetensors"))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
