"""DFlash2 and DSpark drafters for training: blocks of drafts at many places of a batch.

Parameter names are those of the checkpoints that vLLM loads; embeddings and head are the
target's and not part of the drafter.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_dsa.model import DsaModel, RMSNorm

METHODS = ("dspark", "dflash2")
ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}
DRAFTS = 7


def drafter_config(method: str, target: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter's config.json, with the field names of the published ones.

    Args:
        method: one of ``METHODS``.
        target: the target's config.json.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    layers, mask = 2, target["pad_token_id"]
    tapped = [0, target["num_hidden_layers"] - 1]
    config = {
        "architectures": [ARCHITECTURES[method]],
        "model_type": "qwen3",
        "dtype": target["dtype"],
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 2 * target["hidden_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": 128,
        "use_sliding_window": True,
        "block_size": DRAFTS + 1,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": tapped, "causal": True},
    }
    if method == "dflash2":
        config["dflash_config"] |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 64,
            "selector_top_k": 16,
        }
        return config
    return config | {
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "mask_token_id": mask,
        "target_layer_ids": tapped,
    }


class GroupedConv(nn.Module):
    """Two causal convolutions within a block whose kernels depend on their common input."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        kernel = torch.zeros(2, taps, hidden)
        kernel[:, 0] = 1
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """Kernels [2, taps, ..., hidden] for blocks x [..., rows, hidden]."""
        change = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        change = change.repeat_interleave(self.group, dim=-1).movedim((-3, -2), (0, 1))
        shape = (2, self.taps, *[1] * (x.ndim - 1), x.shape[-1])
        return change + self.base_kernel.view(shape)

    def convolve(self, x: Tensor, kernels: Tensor) -> Tensor:
        """One side: x [..., rows, hidden] with kernels [taps, ..., rows, hidden]."""
        total = kernels[0] * x
        for tap in range(1, self.taps):
            total = total + kernels[tap] * F.pad(x[..., :-tap, :], (0, 0, tap, 0))
        return total


class DraftAttention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], config["head_dim"]
        self.heads, self.size = config["num_attention_heads"], size
        if config["num_key_value_heads"] != self.heads:
            raise ValueError("num_key_value_heads must equal num_attention_heads")
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(hidden, self.heads * size, bias=False))
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(size), RMSNorm(size)

    def keys(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., heads, size] of x [..., hidden]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.heads, self.size)))
        return _rotate(k, table), self.v_proj(x).unflatten(-1, (self.heads, self.size))

    def queries(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [..., heads, size] of x [..., hidden]."""
        return _rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.size))), table)


class DraftLayer(nn.Module):
    """One decoder layer of a drafter."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)
        self.self_attn = DraftAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        taps = config["dflash_config"].get("conv_kernel_size")
        self.has_convolutions = taps is not None
        if taps is not None:
            group = config["dflash_config"]["conv_group_size"]
            self.attention_conv = GroupedConv(hidden, taps, group)
            self.mlp_conv = GroupedConv(hidden, taps, group)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The gated MLP."""
        return self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class Drafter(nn.Module):
    """The common backbone, and the heads of the method.

    Args:
        method: one of ``METHODS``.
        target: the model to draft for; its embeddings and head are used as they are.
    """

    def __init__(self, method: str, target: DsaModel) -> None:
        super().__init__()
        self.method, self.config = method, drafter_config(method, target.config)
        hidden, vocabulary = self.config["hidden_size"], self.config["vocab_size"]
        self.taps = self.config["dflash_config"]["target_layer_ids"]
        self.rows = DRAFTS if method == "dspark" else DRAFTS + 1
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = RMSNorm(hidden), RMSNorm(hidden)
        layers = range(self.config["num_hidden_layers"])
        self.layers = nn.ModuleList(DraftLayer(self.config) for _ in layers)
        self.target = [target]  # in a list, so that it is not part of this module
        if method == "dspark":
            rank = self.config["markov_rank"]
            self.markov_head = nn.ModuleDict(
                {
                    "markov_w1": nn.Embedding(vocabulary, rank),
                    "markov_w2": nn.Linear(rank, vocabulary, bias=False),
                }
            )
            nn.init.zeros_(self.markov_head["markov_w2"].weight)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})
        else:
            rank = self.config["dflash_config"]["selector_rank"]
            self.candidate_selector = nn.Module()
            self.candidate_selector.predecessor_codebook = nn.Parameter(
                torch.randn(vocabulary, rank)
            )
            self.candidate_selector.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))
            self.candidate_selector.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, features: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Normed hidden states of the rows that draft.

        Args:
            features: residual streams of the target after the tapped layers, concatenated,
                float [batch, context, taps * hidden].
            anchors: positions of the newest token of each block, int64 [batch, blocks];
                only features before it are read, and of these only the window.
            tokens: the tokens there, int64 [batch, blocks].

        Returns:
            float [batch, blocks, DRAFTS, hidden].
        """
        config, target = self.config, self.target[0]
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(features.shape[1])
        rows = anchors.unsqueeze(-1) + torch.arange(self.rows)
        ids = torch.full(rows.shape, config["dflash_config"]["mask_token_id"])
        ids[..., 0] = tokens
        x = target.embed_tokens(ids)
        near = rows.unsqueeze(-1) - positions < config["sliding_window"]
        visible = (near & (positions < anchors[..., None, None])).flatten(1, 2).unsqueeze(1)
        causal = torch.ones(self.rows, self.rows, dtype=torch.bool).tril()
        context_table, row_table = self._rotary(positions), self._rotary(rows)
        for layer in self.layers:
            keys = layer.self_attn.keys(context, context_table)
            x = self._layer(layer, x, row_table, keys, visible, causal)
        hidden = self.norm(x)
        return hidden if self.method == "dspark" else hidden[..., 1:, :]

    def _layer(
        self,
        layer: DraftLayer,
        x: Tensor,
        table: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        visible: Tensor,
        causal: Tensor,
    ) -> Tensor:
        h = layer.input_layernorm(x)
        if layer.has_convolutions:
            kernels = layer.attention_conv.kernels(h)
            h = layer.attention_conv.convolve(h, kernels[0])
        h = _attend(layer.self_attn, h, table, context, visible, causal)
        if layer.has_convolutions:
            h = layer.attention_conv.convolve(h, kernels[1])
        x = x + h
        h = layer.post_attention_layernorm(x)
        if not layer.has_convolutions:
            return x + layer.feed_forward(h)
        kernels = layer.mlp_conv.kernels(h)
        h = layer.feed_forward(layer.mlp_conv.convolve(h, kernels[0]))
        return x + layer.mlp_conv.convolve(h, kernels[1])

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config["head_dim"]
        theta = self.config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2).float() / size)
        angles = positions.unsqueeze(-1).unsqueeze(-1) * frequencies
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [..., heads, size] whose halves form the pairs."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(
    attention: DraftAttention,
    x: Tensor,
    table: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    visible: Tensor,
    causal: Tensor,
) -> Tensor:
    _, blocks, rows, _ = x.shape
    q = attention.queries(x, table)
    k, v = attention.keys(x, table)
    context_k, context_v = (t.transpose(1, 2) for t in context)
    scale = attention.size**-0.5
    far_q = q.flatten(1, 2).transpose(1, 2)
    far = (far_q @ context_k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    near = torch.einsum("bnqhd,bnkhd->bhnqk", q, k) * scale
    near = near.masked_fill(~causal, float("-inf"))
    weights = torch.cat((far, near.flatten(2, 3)), dim=-1).softmax(-1)
    tokens = context_k.shape[2]
    from_context = (weights[..., :tokens] @ context_v).unflatten(2, (blocks, rows))
    near = weights[..., tokens:].unflatten(2, (blocks, rows))
    from_block = torch.einsum("bhnqk,bnkhd->bhnqd", near, v)
    return attention.o_proj((from_context + from_block).permute(0, 2, 3, 1, 4).flatten(-2))
