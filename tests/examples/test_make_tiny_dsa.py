import hashlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import make_tiny_dsa
import pytest
import torch
from make_tiny_dsa import TinyDsa, main, make_config, write
from safetensors import safe_open
from tiny_tokenizer import SPECIAL_TOKENS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers_oracle import TransformersOracle

SMALL = TinyDsa(layers=4, leaders=2, index_topk=32)


def hashes(directory):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def vllm_leader_layers(config):
    """The rule of vLLM's DeepseekV2MLAAttention: the layers that build an indexer."""
    pattern = config.get("index_topk_pattern")
    period = config.get("index_topk_freq", 1)
    offset = config.get("index_skip_topk_offset", 2)

    def shares(layer):
        if pattern is None:
            return max(layer - offset + 1, 0) % period != 0
        return layer < len(pattern) and pattern[layer] == "S"

    return tuple(i for i in range(config["num_hidden_layers"]) if not shares(i))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write(TinyDsa(), directory)
    return directory


@pytest.fixture(scope="module")
def oracle(directory):
    return TransformersOracle(directory)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def test_equal_settings_give_equal_bytes_in_every_process(directory, tmp_path):
    subprocess.run(
        [sys.executable, make_tiny_dsa.__file__, tmp_path / "model"],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert hashes(tmp_path / "model") == hashes(directory)


def test_the_seed_changes_the_weights_alone(tmp_path):
    for seed in (0, 1):
        write(TinyDsa(layers=2, seed=seed), tmp_path / str(seed))
    first, second = hashes(tmp_path / "0"), hashes(tmp_path / "1")
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


def test_the_folder_is_small(directory):
    assert sum(path.stat().st_size for path in directory.iterdir()) < 12e6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "llama"}, "architecture must be one of glm_moe_dsa, deepseek_v32"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, not 'float16'"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"index_topk": 0}, "index_topk must be at least 1, not 0"),
        ({"max_model_len": -1}, "max_model_len must be at least 1, not -1"),
        ({"index_heads": 0}, "index_heads must be at least 1, not 0"),
        ({"hidden_size": 100}, "hidden_size must be a positive multiple of 64, not 100"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive multiple of 64, not 0"),
        ({"leaders": 9}, "leaders must be between 1 and layers = 8, not 9"),
        ({"leaders": 0}, "leaders must be between 1 and layers = 8, not 0"),
        (
            {"architecture": "deepseek_v32", "leaders": 2},
            "leaders must equal layers = 8, not 2: deepseek_v32 has no index sharing",
        ),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TinyDsa(**settings)


def test_the_command_line_reports_a_bad_setting(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "model"), "--index-topk", "0"])
    assert "index_topk must be at least 1, not 0" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_the_command_line_sets_what_the_class_sets(tmp_path):
    options = "--architecture deepseek_v32 --layers 2 --index-topk 16 --max-model-len 4096"
    options += " --hidden-size 64 --kv-lora-rank 64 --index-heads 2 --dtype bfloat16 --seed 5"
    main([str(tmp_path / "a"), *options.split()])
    settings = TinyDsa(
        architecture="deepseek_v32",
        layers=2,
        index_topk=16,
        max_model_len=4096,
        hidden_size=64,
        kv_lora_rank=64,
        index_heads=2,
        dtype="bfloat16",
        seed=5,
    )
    write(settings, tmp_path / "b")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


@pytest.mark.parametrize(
    ("layers", "leaders", "expected"),
    [
        (8, None, (0, 4)),
        (8, 1, (0,)),
        (8, 8, tuple(range(8))),
        (8, 3, (0, 2, 5)),
        (7, 2, (0, 3)),
        (6, 4, (0, 1, 3, 4)),
        (1, None, (0,)),
    ],
)
def test_vllm_and_transformers_agree_on_the_leaders(tmp_path, layers, leaders, expected):
    settings = TinyDsa(layers=layers, leaders=leaders, hidden_size=64, kv_lora_rank=64)
    write(settings, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert settings.leader_layers == expected
    assert vllm_leader_layers(json.loads((tmp_path / "config.json").read_text())) == expected
    assert tuple(i for i, t in enumerate(config.indexer_types) if t == "full") == expected
    with safe_open(tmp_path / "model.safetensors", "pt") as checkpoint:
        names = checkpoint.keys()
        owners = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert tuple(sorted(owners)) == expected
    assert TransformersOracle(tmp_path).leader_layers == expected


def test_without_leaders_every_layer_of_deepseek_owns_an_indexer():
    settings = TinyDsa(architecture="deepseek_v32", layers=3)
    assert settings.leader_layers == vllm_leader_layers(make_config(settings)) == (0, 1, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["glm_moe_dsa", "deepseek_v32"])
def test_transformers_loads_the_folder(tmp_path, architecture, dtype):
    write(TinyDsa(architecture=architecture, layers=2, dtype=dtype), tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    assert [type(model).__name__] == model.config.architectures
    assert model.dtype == getattr(torch, dtype)
    assert model.config.max_position_embeddings == 16384


def test_the_tokenizer_round_trips_any_text(tokenizer):
    texts = [
        Path(make_tiny_dsa.__file__).read_text(),
        "tabs\t, blanks   , lines\n\n\r\n and 'quotes' ,before . punctuation",
        "Grüße, Привет, 你好, \N{GRINNING FACE}\N{ZERO WIDTH JOINER}\x00\x7f\u2028",
        "",
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(range(len(SPECIAL_TOKENS)))
    assert len(tokenizer.encode("the Work")) < len("the Work")


def test_the_chat_template_marks_every_turn(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s><|system|>Be brief.<|user|>Hello<|assistant|>Yes?</s><|user|>Go on<|assistant|>"
    )
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == SPECIAL_TOKENS.index("<|assistant|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Be brief.HelloYes?Go on"


def test_the_special_tokens_of_model_and_tokenizer_agree(directory, tokenizer):
    config = AutoConfig.from_pretrained(directory)
    assert config.vocab_size == len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(tokenizer, name)


def test_greedy_output_varies_and_is_text(oracle, tokenizer):
    prompt = tokenizer.encode("Unless required by applicable law or agreed to in writing")
    generated = oracle.greedy(prompt, 64)
    assert len(set(generated)) > 32
    text = tokenizer.decode(generated)
    assert text.isascii()
    assert text.isprintable()


def test_the_output_depends_on_far_context(oracle, tokenizer):
    tail = tokenizer.encode("You may reproduce and distribute copies of the Work. " * 4)
    heads = [tokenizer.encode(word * 40) for word in ("Licensor ", "Derivative ")]
    first, second = (oracle.logprobs(head + tail)[-len(tail) :] for head in heads)
    changed = first.argmax(dim=-1) != second.argmax(dim=-1)
    assert changed.float().mean() > 0.1


def test_selections_are_neither_fixed_nor_random(oracle, tokenizer):
    license_text = (Path(make_tiny_dsa.__file__).parent.parent / "LICENSE").read_text()
    token_ids = tokenizer.encode(license_text)[:600]
    selections = oracle.selections(token_ids)
    for selected in selections.values():
        rows = [set(row) for row in selected[400:].tolist()]
        overlap = [len(a & b) / 64 for a, b in pairwise(rows)]
        # Random selections of 64 in 500 rows share 0.13, a fixed one shares 1.
        assert 0.25 < sum(overlap) / len(overlap) < 0.9
        assert len(set().union(*rows)) > 200
    first, second = (selected[-1] for selected in selections.values())
    assert not torch.equal(first, second)
