"""Tiny drafters for the models of make_tiny_dsa.py: DFlash, DFlash2 or DSpark in about 1 MB.

DFlash2 and DSpark are often right about a target of
low context_gain: both know which token follows which. What the drafter's layers add decides
some of its guesses, so a wrong row of draft KV changes drafts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tiny_drafter_weights import make_drafter_weights

ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
SELECTOR_TOP_K = 128


@dataclass(frozen=True, slots=True)
class TinyDrafter:
    """Settings of a tiny drafter.

    Attributes:
        method: ``dflash``, ``dflash2`` (which vLLM calls dflash too) or ``dspark``.
        layers: decoder layers.
        window: tokens that a layer attends to, itself included; 0 = all.
        full_layers: of them the last so many attend to all tokens, whatever ``window``.
        key_value_heads: of 64 values each.
        seed: of the random weights.

    Raises:
        ValueError: a setting is outside of its range; the message names it.
    """

    method: str = "dspark"
    layers: int = 2
    window: int = 128
    full_layers: int = 0
    key_value_heads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"method must be one of {known}, not {self.method!r}")
        for name in ("layers", "key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.window < 0:
            raise ValueError(f"window must be at least 0, not {self.window}")
        if not 0 <= self.full_layers <= self.layers:
            raise ValueError(f"full_layers must be between 0 and layers, not {self.full_layers}")


def write(settings: TinyDrafter, target: Path | str, directory: Path | str) -> None:
    """Write the drafter's folder; equal settings and targets give equal bytes.

    Args:
        settings: what to write.
        target: folder of the model to draft for.
        directory: made when missing; files of the same names are replaced.
    """
    target, directory = Path(target), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    target_config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = make_config(settings, target_config)
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    target_weights = load_file(target / "model.safetensors")
    weights = make_drafter_weights(
        config,
        settings.method,
        target_weights["model.embed_tokens.weight"].float(),
        target_weights["lm_head.weight"].float(),
        settings.seed,
    )
    dtype = getattr(torch, target_config["dtype"])
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    (directory / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def make_config(settings: TinyDrafter, target: dict[str, Any]) -> dict[str, Any]:
    """The drafter's config.json, with the field names of the published ones."""
    windowed = settings.layers - settings.full_layers if settings.window else 0
    full = settings.layers - windowed
    # The states after a layer early and one late in the target.
    tapped = sorted({0, target["num_hidden_layers"] - 2} - {-1})
    mask = target["pad_token_id"]
    config = {
        "architectures": [ARCHITECTURES[settings.method]],
        "model_type": "qwen3",
        "dtype": target["dtype"],
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": target["hidden_size"],
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 2 * settings.key_value_heads,
        "num_key_value_heads": settings.key_value_heads,
        "head_dim": 64,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] * windowed + ["full_attention"] * full,
        "sliding_window": settings.window or None,
        "use_sliding_window": bool(windowed),
        "block_size": 8,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": tapped, "causal": False},
    }
    if settings.method == "dflash2":
        config["dflash_config"] |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": target["hidden_size"],
            "selector_top_k": SELECTOR_TOP_K,
        }
    elif settings.method == "dspark":
        config |= {
            "markov_rank": target["hidden_size"],
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "mask_token_id": mask,
            "target_layer_ids": tapped,
        }
    return config
