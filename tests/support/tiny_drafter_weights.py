"""Weights of a tiny drafter: random layers, and heads made from its target's embeddings."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from tiny_weights import CONSTANT, RandomSource, make_mlp
from torch import Tensor

# How much of the target's "which token follows which" the heads know. The layers' logits
# have the deviation of the target's, so they decide some of the guesses.
SUCCESSOR_GAIN = 0.5
# Norm weights of queries and keys: attention to a few rows, as in the target.
SHARPNESS = 2.0
# Deviation of a branch's contribution, in units of the token embedding's.
BRANCH_GAIN = 1.0


def make_drafter_weights(
    config: Mapping[str, Any], method: str, embeddings: Tensor, head: Tensor, seed: int
) -> dict[str, Tensor]:
    """All tensors of the checkpoint by name, float32; embeddings and head are the target's.

    Args:
        config: the drafter's config.json.
        method: ``dflash``, ``dflash2`` or ``dspark``.
        embeddings: [vocab_size, hidden_size] of the target; channel 0 is constant.
        head: [vocab_size, hidden_size], the target's output head.
        seed: of the random numbers.
    """
    source = RandomSource(seed)
    hidden = config["hidden_size"]
    tapped = len(config["dflash_config"]["target_layer_ids"])
    weights = {
        "fc.weight": source.matrix(hidden, hidden * tapped),
        "hidden_norm.weight": source.scale(hidden),
        "norm.weight": source.scale(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = [_attention(config, source)]
        parts.append(make_mlp(config, source, "mlp.", config["intermediate_size"], BRANCH_GAIN))
        if method == "dflash2":
            parts.append(_convolutions(config, source))
        weights |= {f"layers.{layer}.{name}": tensor for name, tensor in chain(*parts)}
    tokens = embeddings.clone()
    tokens[:, 0] = 0
    if method == "dspark":
        weights |= {
            "markov_head.markov_w1.weight": tokens,
            "markov_head.markov_w2.weight": head * SUCCESSOR_GAIN,
            "confidence_head.proj.weight": source.matrix(1, 2 * hidden),
            "confidence_head.proj.bias": torch.zeros(1),
        }
    elif method == "dflash2":
        # The selector multiplies a pair's score with a projection of the hidden state. This
        # one reads the channel that is the same for every token.
        gate = torch.zeros(hidden, hidden)
        gate[:, 0] = 2 / CONSTANT
        weights |= {
            "candidate_selector.predecessor_codebook": tokens,
            "candidate_selector.successor_codebook": head * SUCCESSOR_GAIN,
            "candidate_selector.hidden_projection.weight": gate,
        }
    return weights


def _attention(config: Mapping[str, Any], source: RandomSource) -> Iterator[tuple[str, Tensor]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    yield "input_layernorm.weight", source.scale(hidden)
    yield "post_attention_layernorm.weight", source.scale(hidden)
    yield "self_attn.q_proj.weight", source.reader(queries, hidden)
    yield "self_attn.k_proj.weight", source.matrix(keys, hidden)
    yield "self_attn.v_proj.weight", source.matrix(keys, hidden)
    yield "self_attn.o_proj.weight", source.writer(hidden, queries, BRANCH_GAIN)
    yield "self_attn.q_norm.weight", SHARPNESS * source.scale(size)
    yield "self_attn.k_norm.weight", source.scale(size)


def _convolutions(config: Mapping[str, Any], source: RandomSource) -> Iterator[tuple[str, Tensor]]:
    hidden, settings = config["hidden_size"], config["dflash_config"]
    taps, groups = settings["conv_kernel_size"], hidden // settings["conv_group_size"]
    for name in ("attention_conv", "mlp_conv"):
        kernel = 0.3 * source.normal(2, taps, hidden)
        kernel[:, 0] += 1
        yield f"{name}.base_kernel", kernel
        yield f"{name}.kernel_projection.weight", source.matrix(2 * taps * groups, hidden, 0.2)
