"""Write a tiny DSA model with random weights: GLM-5.x or DeepSeek-V3.2 in a few MB.

    python examples/make_tiny_dsa.py DIRECTORY --layers 8 --leaders 2

The folder loads in vLLM and in transformers and holds a real tokenizer with a chat
template. Only tokens of printable text have logits other than 0, so greedy output is text
without sense that ends at its length limit.
"""

import argparse
import json
import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tiny_tokenizer import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    printable_tokens,
    write_tokenizer,
)
from tiny_weights import make_weights

ARCHITECTURES = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TinyDsa:
    """Settings of a tiny DSA model.

    Attributes:
        architecture: ``glm_moe_dsa`` or ``deepseek_v32``.
        layers: decoder layers; the first has a dense MLP, the others experts.
        leaders: layers that own an indexer, spread evenly from layer 0; the others
            follow. None means 2 for glm_moe_dsa and every layer for deepseek_v32.
        index_topk: rows that one query selects.
        max_model_len: longest sequence in tokens.
        hidden_size: a positive multiple of 64.
        kv_lora_rank: values of the latent in one row, without its 64 rotary values; a
            positive multiple of 64. FlashMLA needs 512.
        index_heads: heads of the indexer.
        dtype: ``float32`` or ``bfloat16``.
        seed: of the random weights.
        context_gain: what the layers add to a token's embedding, in units of that. Drafters
            guess the token after a token well where it is low.

    Raises:
        ValueError: a setting is outside of its range; the message names it.
    """

    architecture: str = "glm_moe_dsa"
    layers: int = 8
    leaders: int | None = None
    index_topk: int = 64
    max_model_len: int = 16384
    hidden_size: int = 128
    kv_lora_rank: int = 128
    index_heads: int = 4
    dtype: str = "float32"
    seed: int = 0
    context_gain: float = 3.5

    def __post_init__(self) -> None:
        _require_one_of("architecture", self.architecture, ARCHITECTURES)
        _require_one_of("dtype", self.dtype, DTYPES)
        for name in ("layers", "index_topk", "max_model_len", "index_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("hidden_size", "kv_lora_rank"):
            value = getattr(self, name)
            if value < 64 or value % 64:
                raise ValueError(f"{name} must be a positive multiple of 64, not {value}")
        if not 0 <= self.context_gain < math.inf:
            raise ValueError(f"context_gain must be at least 0, not {self.context_gain}")
        if self.leaders is None:
            return
        if not 1 <= self.leaders <= self.layers:
            raise ValueError(
                f"leaders must be between 1 and layers = {self.layers}, not {self.leaders}"
            )
        if self.architecture == "deepseek_v32" and self.leaders != self.layers:
            raise ValueError(
                f"leaders must equal layers = {self.layers}, not {self.leaders}: "
                "deepseek_v32 has no index sharing"
            )

    @property
    def leader_layers(self) -> tuple[int, ...]:
        """The layers that own an indexer, ascending."""
        leaders = self.leaders
        if leaders is None:
            shares = self.architecture == "glm_moe_dsa"
            leaders = min(2, self.layers) if shares else self.layers
        return tuple(i * self.layers // leaders for i in range(leaders))


def write(settings: TinyDsa, directory: Path | str) -> None:
    """Write the model folder; equal settings give equal bytes.

    Args:
        settings: what to write.
        directory: made when missing; files of the same names are replaced.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(directory, settings.max_model_len)
    config = make_config(settings)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = make_weights(
        config,
        settings.leader_layers,
        printable_tokens(tokenizer),
        DTYPES[settings.dtype],
        settings.seed,
        settings.context_gain,
    )
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def make_config(settings: TinyDsa) -> dict[str, Any]:
    """The model's config.json, with the field names of the published models."""
    config = {
        "architectures": [ARCHITECTURES[settings.architecture]],
        "model_type": settings.architecture,
        "dtype": settings.dtype,
        "vocab_size": VOCABULARY_SIZE,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "tie_word_embeddings": False,
        "max_position_embeddings": settings.max_model_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_nextn_predict_layers": 0,
        # transformers norms both latents with 1e-6 whatever this says, vLLM with this.
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": settings.kv_lora_rank,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "attention_bias": False,
        "index_topk": settings.index_topk,
        "index_head_dim": 128,
        "index_n_heads": settings.index_heads,
        "intermediate_size": 2 * settings.hidden_size,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    if settings.architecture == "glm_moe_dsa":
        config["indexer_rope_interleave"] = True
        config |= index_sharing(settings.layers, settings.leader_layers)
    return config


def index_sharing(layers: int, leader_layers: tuple[int, ...]) -> dict[str, Any]:
    """The config fields that say which layers own an indexer.

    An even spread is a period, as in GLM-5.2; any other is a pattern, one letter per
    layer: F runs the indexer, S shares the selection of the last F before it.
    """
    if layers % len(leader_layers) == 0:
        period = layers // len(leader_layers)
        return {"index_topk_freq": period, "index_skip_topk_offset": 1}
    return {"index_topk_pattern": "".join("SF"[i in leader_layers] for i in range(layers))}


def main(arguments: list[str] | None = None) -> None:
    """Command line: the settings of `TinyDsa` as options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    for field in fields(TinyDsa):
        assert field.default is not MISSING
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=int if field.default is None else type(field.default),
            default=field.default,
            help=f"default: {field.default}",
        )
    options = vars(parser.parse_args(arguments))
    directory = options.pop("directory")
    try:
        settings = TinyDsa(**options)
    except ValueError as error:
        parser.error(str(error))
    write(settings, directory)


def _require_one_of(name: str, value: str, known: dict[str, Any]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


if __name__ == "__main__":
    main()
