"""The model, and its drafters, as folders that vLLM loads, the model also transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tiny_tokenizer import save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from tiny_dsa.drafter import Drafter
from tiny_dsa.model import DsaModel, Mlp
from tiny_dsa.settings import LEADERS, SHAPE, target_config

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write_target(model: DsaModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config, weights (float32) and tokenizer; equal weights give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory, SHAPE.max_model_len)
    _write(model.config, checkpoint_weights(model), directory)


def read_target(directory: Path) -> DsaModel:
    """The model of a folder that `write_target` wrote.

    Raises:
        ValueError: the folder holds a model of another shape.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config != json.loads(json.dumps(target_config())):
        raise ValueError(f"{directory} does not hold the model that settings.py describes")
    model = DsaModel(config, LEADERS)
    weights = load_file(directory / "model.safetensors")
    own = model.state_dict()
    for name, tensor in checkpoint_weights(model).items():
        tensor.copy_(weights.pop(name))
    if weights:
        raise ValueError(f"{directory} has unknown weights: {', '.join(sorted(weights))}")
    model.load_state_dict(own)
    return model.eval()


def write_drafter(drafter: Drafter, directory: Path) -> None:
    """Write config and weights (float32)."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(drafter.config, drafter.state_dict(), directory)


def read_drafter(method: str, target: DsaModel, directory: Path) -> Drafter:
    """The drafter of a folder that `write_drafter` wrote."""
    drafter = Drafter(method, target)
    drafter.load_state_dict(load_file(directory / "model.safetensors"))
    return drafter.eval()


@torch.no_grad()
def checkpoint_weights(model: DsaModel) -> dict[str, Tensor]:
    """Views of the weights under the names of the published checkpoints."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, _, tail = name.partition(".mlp.")
        projection = tail.removesuffix(".weight")
        mlp = _mlp(model, prefix) if tail else None
        if mlp is None or not mlp.experts:
            weights[name if name.startswith("lm_head") else "model." + name] = tensor
        elif projection in _PROJECTIONS:
            parts = tensor.split(mlp.size, dim=1 if projection == "down_proj" else 0)
            for number, part in enumerate(parts):
                part_name = f"experts.{number}" if number < mlp.experts else "shared_experts"
                weights[f"model.{prefix}.mlp.{part_name}.{projection}.weight"] = part
        else:
            tail = f"gate.{tail}" if tail == "e_score_correction_bias" else tail
            weights[f"model.{prefix}.mlp.{tail}"] = tensor
    return weights


def _write(config: Mapping[str, Any], weights: Mapping[str, Tensor], directory: Path) -> None:
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    (directory / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def _mlp(model: DsaModel, prefix: str) -> Mlp:
    mlp = model.get_submodule(prefix + ".mlp")
    assert isinstance(mlp, Mlp)
    return mlp
