"""Tiny drafters: equal bytes, and what the config promises."""

import json

import pytest
from make_tiny_drafter import TinyDrafter, write
from safetensors.torch import load_file


def test_equal_settings_give_equal_bytes(tiny_dsa, tmp_path):
    target = tiny_dsa(layers=2, leaders=1)
    for name in ("a", "b"):
        write(TinyDrafter("dflash2"), target, tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("settings", "layer_types"),
    [
        ({"window": 40}, ["sliding_attention"] * 2),
        ({"window": 0}, ["full_attention"] * 2),
        ({"full_layers": 1}, ["sliding_attention", "full_attention"]),
    ],
)
def test_layers_have_the_windows_asked_for(tiny_dsa, tmp_path, settings, layer_types):
    write(TinyDrafter("dspark", **settings), tiny_dsa(layers=2, leaders=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == layer_types
    assert config["architectures"] == ["Qwen3DSparkModel"]


def test_heads_know_which_token_follows_which(tiny_dsa, tmp_path):
    target = tiny_dsa(layers=2, leaders=1)
    write(TinyDrafter("dspark"), target, tmp_path)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, target))
    scores = ours["markov_head.markov_w1.weight"] @ ours["markov_head.markov_w2.weight"].T
    spoken = theirs["lm_head.weight"].abs().sum(1) > 0
    followers = scores[spoken].argmax(1)
    assert len(set(followers.tolist())) == int(spoken.sum()), "each token has its own"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "eagle"}, "method must be one of dflash, dflash2, dspark"),
        ({"window": -1}, "window must be at least 0"),
        ({"full_layers": 3}, "full_layers must be between 0 and layers"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        TinyDrafter(**settings)
