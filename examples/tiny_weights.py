"""Random weights of a tiny DSA model, under the names of the published checkpoints."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

# Attention logits get a deviation of about QUERY_GAIN: a query then reads a few of its
# selected rows, not their mean, so that one wrong row changes the output.
QUERY_GAIN = 4.0
LOGIT_DEVIATION = 2.5
# Channel 0 of the residual stream is the same for every token; only the indexer reads it,
# through channel 0 of the query latent. So some rows are important to every query, and the
# selections of successive queries overlap as those of trained models do.
CONSTANT = 4.0


def make_weights(
    config: Mapping[str, Any],
    leaders: Collection[int],
    spoken: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    context_gain: float,
) -> dict[str, Tensor]:
    """All tensors of the checkpoint by name; equal arguments give equal bytes.

    The output head is a permutation of the embeddings: without context each spoken
    token would be followed by its successor in a fixed random cycle. The layers add
    context of comparable size, so the text depends on both.

    Args:
        config: the model's config.json.
        leaders: layers that own an indexer.
        spoken: ids of the tokens that may be generated; the others have logit 0.
        dtype: of every tensor but the router's correction bias, which is float32.
        seed: of the random numbers.
        context_gain: deviation of all layers' contributions together, in units of the
            token embedding's.
    """
    source = RandomSource(seed)
    hidden_size, vocab_size = config["hidden_size"], config["vocab_size"]
    embeddings = source.normal(vocab_size, hidden_size)
    embeddings[:, 0] = 0
    cycle = torch.tensor(spoken)[source.permutation(len(spoken))]
    head = torch.zeros(vocab_size, hidden_size)
    head[cycle.roll(-1)] = embeddings[cycle] * (LOGIT_DEVIATION / math.sqrt(hidden_size))
    embeddings[:, 0] = CONSTANT
    weights = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": source.scale(hidden_size),
        "lm_head.weight": head,
    }
    gain = context_gain / math.sqrt(2 * config["num_hidden_layers"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = _attention(config, source, layer in leaders, gain)
        is_dense = layer < config["first_k_dense_replace"]
        dense_size = config["intermediate_size"]
        if is_dense:
            mlp = make_mlp(config, source, "mlp.", dense_size, gain)
        else:
            mlp = _experts(config, source, gain)
        weights |= {prefix + name: tensor for name, tensor in chain(attention, mlp)}
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in weights.items()
    }


class RandomSource:
    """Random tensors, float32, in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Values of deviation one."""
        return torch.randn(*shape, generator=self._generator)

    def permutation(self, size: int) -> Tensor:
        """The numbers below ``size`` in random order."""
        return torch.randperm(size, generator=self._generator)

    def matrix(self, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        """Maps unit-deviation inputs to outputs of deviation ``gain``."""
        return self.normal(outputs, inputs) * (gain / math.sqrt(inputs))

    def reader(self, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        """A matrix that does not read the constant channel."""
        matrix = self.matrix(outputs, inputs, gain)
        matrix[:, 0] = 0
        return matrix

    def writer(self, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        """A matrix that does not write the constant channel."""
        matrix = self.matrix(outputs, inputs, gain)
        matrix[0] = 0
        return matrix

    def scale(self, size: int) -> Tensor:
        """Norm weights near one, but not one: a weight that is not loaded shows."""
        return self.normal(size).mul(0.1).add(1)


def _attention(
    config: Mapping[str, Any], source: RandomSource, is_leader: bool, gain: float
) -> Iterator[tuple[str, Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
    yield "input_layernorm.weight", source.scale(hidden)
    yield "post_attention_layernorm.weight", source.scale(hidden)
    query_latent = source.reader(query_rank, hidden)
    query_latent[0] = torch.eye(1, hidden)
    yield "self_attn.q_a_proj.weight", query_latent
    yield "self_attn.q_a_layernorm.weight", source.scale(query_rank)
    queries = source.reader(heads * (nope + rope), query_rank, QUERY_GAIN)
    yield "self_attn.q_b_proj.weight", queries
    yield "self_attn.kv_a_proj_with_mqa.weight", source.reader(latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", source.scale(latent)
    yield "self_attn.kv_b_proj.weight", source.matrix(heads * (nope + value), latent)
    output = source.writer(hidden, heads * value, gain)
    yield "self_attn.o_proj.weight", output
    if is_leader:
        index_heads, index_size = config["index_n_heads"], config["index_head_dim"]
        prefix = "self_attn.indexer."
        queries = source.matrix(index_heads * index_size, query_rank)
        queries[:, 0] *= math.sqrt(query_rank)  # as strong as all other channels together
        yield prefix + "wq_b.weight", queries
        yield prefix + "wk.weight", source.reader(index_size, hidden)
        yield prefix + "k_norm.weight", source.scale(index_size)
        yield prefix + "k_norm.bias", 0.1 * source.normal(index_size)
        head_weights = source.matrix(index_heads, hidden)
        head_weights[:, 0] = 1
        yield prefix + "weights_proj.weight", head_weights


def _experts(
    config: Mapping[str, Any], source: RandomSource, gain: float
) -> Iterator[tuple[str, Tensor]]:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    size = config["moe_intermediate_size"]
    yield "mlp.gate.weight", source.reader(experts, hidden)
    yield "mlp.gate.e_score_correction_bias", 0.1 * source.normal(experts)
    for expert in range(experts):
        yield from make_mlp(config, source, f"mlp.experts.{expert}.", size, gain)
    shared_size = size * config["n_shared_experts"]
    yield from make_mlp(config, source, "mlp.shared_experts.", shared_size, gain)


def make_mlp(
    config: Mapping[str, Any], source: RandomSource, prefix: str, size: int, gain: float
) -> Iterator[tuple[str, Tensor]]:
    """The three matrices of a gated MLP that adds values of deviation ``gain``."""
    hidden = config["hidden_size"]
    yield prefix + "gate_proj.weight", source.reader(size, hidden)
    yield prefix + "up_proj.weight", source.reader(size, hidden)
    yield prefix + "down_proj.weight", source.writer(hidden, size, gain)
