"""The forward pass of GLM-5.x DSA for training: whole batches of equally long sequences.

Parameter names are those of the checkpoint, except that the experts of a layer and its shared
expert are stacked into one wide MLP (`checkpoint.py` takes them apart).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DENSE, WARM, SPARSE, SHUFFLED = "dense", "warm", "sparse", "shuffled"
MODES = (DENSE, WARM, SPARSE, SHUFFLED)


@dataclass
class Pass:
    """What one forward pass leaves beside its logits.

    Attributes:
        hidden: residual stream after each layer, float [batch, tokens, hidden].
        index_losses: per leader, KL of the head-summed attention of its layers to the
            indexer's softmax, in nats; with modes ``warm`` and ``sparse`` only.
        selections: per leader, bool [batch, tokens, tokens]: rows that a query reads.
        expert_load: per layer with experts, share of tokens of each expert.
    """

    hidden: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)
    selections: list[Tensor] = field(default_factory=list)
    expert_load: dict[int, Tensor] = field(default_factory=dict)


class RMSNorm(nn.Module):
    """Root mean square norm with eps 1e-6."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rotary_table(tokens: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float [tokens, size / 2] each."""
    frequencies = theta ** -(torch.arange(0, size, 2).float() / size)
    angles = torch.arange(tokens).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Interleaved rotary embedding of x [..., tokens, size]: neighbours form a pair."""
    cos, sin = table
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class Indexer(nn.Module):
    """Scores of the lightning indexer; its inputs carry no gradient to the model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, rank = config["hidden_size"], config["q_lora_rank"]
        self.heads, self.size = config["index_n_heads"], config["index_head_dim"]
        self.rope = config["qk_rope_head_dim"]
        self.wq_b = nn.Linear(rank, self.heads * self.size, bias=False)
        self.wk = nn.Linear(hidden, self.size, bias=False)
        self.k_norm = nn.LayerNorm(self.size, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, self.heads, bias=False)

    def project(
        self, x: Tensor, query_latent: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries by head, keys [batch, tokens, size], weights [batch, tokens, heads]."""
        x, query_latent = x.detach(), query_latent.detach()
        batch, tokens, _ = x.shape
        q = self.wq_b(query_latent).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k = self.k_norm(self.wk(x))
        q = torch.cat((rotate_pairs(q[..., : self.rope], table), q[..., self.rope :]), dim=-1)
        k = torch.cat((rotate_pairs(k[..., : self.rope], table), k[..., self.rope :]), dim=-1)
        return q, k, self.weights_proj(x) * (self.heads**-0.5 * self.size**-0.5)

    def score(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Scores [batch, queries, keys] without causal mask."""
        scores = q.new_zeros(q.shape[0], q.shape[2], k.shape[1])
        for head in range(self.heads):
            product = torch.relu(q[:, head] @ k.transpose(1, 2))
            scores = torch.addcmul(scores, weights[..., head, None], product)
        return scores


class Attention(nn.Module):
    """Multi-head latent attention, expanded to ordinary heads."""

    def __init__(self, config: Mapping[str, Any], is_leader: bool) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.latent, self.rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        self.nope, self.value = config["qk_nope_head_dim"], config["v_head_dim"]
        rank = config["q_lora_rank"]
        self.q_a_proj = nn.Linear(hidden, rank, bias=False)
        self.q_a_layernorm = RMSNorm(rank)
        self.q_b_proj = nn.Linear(rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        self.indexer = Indexer(config) if is_leader else None

    def project(
        self, x: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query latent [batch, tokens, rank], then queries, keys and values by head."""
        batch, tokens, _ = x.shape
        latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(latent).view(batch, tokens, self.heads, -1).transpose(1, 2)
        q = torch.cat((q[..., : self.nope], rotate_pairs(q[..., self.nope :], table)), dim=-1)
        kv = self.kv_a_proj_with_mqa(x)
        k_rope = rotate_pairs(kv[..., self.latent :], table).unsqueeze(1)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv[..., : self.latent]))
        kv = kv.view(batch, tokens, self.heads, -1).transpose(1, 2)
        k = torch.cat((kv[..., : self.nope], k_rope.expand(-1, self.heads, -1, -1)), dim=-1)
        return latent, q, k, kv[..., self.nope :]

    def output(self, heads: Tensor) -> Tensor:
        """The layer's output from heads [batch, heads, tokens, value]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated MLP; with ``experts`` a mixture of them and one shared expert, all stacked."""

    def __init__(self, config: Mapping[str, Any], experts: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.experts, self.top_k = experts, config["num_experts_per_tok"]
        self.scale = config["routed_scaling_factor"]
        self.size = config["moe_intermediate_size" if experts else "intermediate_size"]
        wide = self.size * (experts + 1)
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        if experts:
            self.gate = nn.Linear(hidden, experts, bias=False)
            self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output of x's shape, and the share of tokens that each expert got."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        if not self.experts:
            return self.down_proj(inner), None
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        weights = torch.cat((weights, torch.ones_like(weights[..., :1])), dim=-1)
        inner = inner.unflatten(-1, (self.experts + 1, self.size)) * weights.unsqueeze(-1)
        return self.down_proj(inner.flatten(-2)), mask.flatten(0, -2).mean(0)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Mapping[str, Any], is_leader: bool, experts: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, is_leader)
        self.mlp = Mlp(config, experts)
        self.input_layernorm = RMSNorm(config["hidden_size"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"])


class DsaModel(nn.Module):
    """A GLM-5.x DSA decoder with index sharing.

    Args:
        config: config.json as `make_tiny_dsa.make_config` writes it.
        leaders: layers that own an indexer; layer 0 among them.
    """

    def __init__(self, config: Mapping[str, Any], leaders: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.leaders = dict(config), leaders
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        dense = config["first_k_dense_replace"]
        self.layers = nn.ModuleList(
            Layer(config, i in leaders, 0 if i < dense else config["n_routed_experts"])
            for i in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def logits(self, tokens: Tensor, mode: str, generator: torch.Generator | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of token ids [batch, tokens]."""
        return self.lm_head(self.norm(self(tokens, mode, generator).hidden[-1]))

    def forward(self, tokens: Tensor, mode: str, generator: torch.Generator | None = None) -> Pass:
        """Run all layers over token ids [batch, tokens].

        Args:
            tokens: int64 [batch, tokens].
            mode: ``dense`` attends to all rows; ``warm`` too, and measures the indexer
                against the attention; ``sparse`` attends to the index_topk rows chosen
                and measures the indexer on them; ``shuffled`` is a control: as many
                rows as ``sparse``, chosen at random.
            generator: of the random choice of ``shuffled``.

        Raises:
            ValueError: the mode is unknown.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        table = self.rotary(tokens.shape[1])
        x = self.embed_tokens(tokens)
        result = Pass()
        group: _Group | None = None
        for number, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            attention: Attention = layer.self_attn
            latent, q, k, v = attention.project(normed, table)
            if attention.indexer is not None and mode != DENSE:
                _close(group, result)
                scores = attention.indexer.score(*attention.indexer.project(normed, latent, table))
                group = _Group(scores, mode, self.config["index_topk"], generator)
                result.selections.append(group.mask)
            x = x + attention.output(_attend(q, k, v, group))
            output, load = layer.mlp(layer.post_attention_layernorm(x))
            x = x + output
            result.hidden.append(x)
            if load is not None:
                result.expert_load[number] = load
        _close(group, result)
        return result

    def rotary(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, float [tokens, rope / 2] each."""
        if tokens not in self._tables:
            size = self.config["qk_rope_head_dim"]
            theta = self.config["rope_parameters"]["rope_theta"]
            self._tables[tokens] = rotary_table(tokens, size, theta)
        return self._tables[tokens]


def select(
    scores: Tensor, causal: Tensor, mode: str, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """Rows that queries read: bool [batch, queries, keys]. Of equal scores the first wins.

    Args:
        scores: of the indexer, [batch, queries, keys]; -inf where not causal.
        causal: bool [queries, keys].
        mode: all rows for ``dense`` and ``warm``, the best for ``sparse``, as many at
            random for ``shuffled``.
        top_k: rows of a query, where it sees that many.
        generator: of the random choice.
    """
    if mode in (DENSE, WARM) or scores.shape[-1] <= top_k:
        return causal.expand_as(scores)
    if mode == SHUFFLED:
        scores = torch.rand(scores.shape, generator=generator).masked_fill(~causal, -1.0)
    last = scores.topk(top_k, dim=-1).values[..., -1:]
    above, tied = scores > last, scores == last
    places = top_k - above.sum(-1, keepdim=True)
    if (tied.sum(-1, keepdim=True) > places).any():
        tied &= tied.cumsum(-1) <= places
    return (above | tied) & causal


class _Group:
    """The layers of one leader in one pass: their selection, and their summed attention."""

    def __init__(
        self, scores: Tensor, mode: str, top_k: int, generator: torch.Generator | None
    ) -> None:
        tokens = scores.shape[-1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        self.attention: Tensor | None = None
        self.layers = 0
        self.scores = scores.masked_fill(~causal, float("-inf"))
        self.measures = torch.is_grad_enabled() and mode in (WARM, SPARSE)
        self.mask = select(self.scores.detach(), causal, mode, top_k, generator)

    def add(self, probabilities: Tensor) -> None:
        """Add a layer's attention [batch, heads, tokens, tokens] to the indexer's aim."""
        self.layers += 1
        if self.measures:
            summed = probabilities.detach().mean(1)
            self.attention = summed if self.attention is None else self.attention + summed

    def loss(self) -> Tensor:
        """KL of the layers' mean attention to the indexer's softmax over the rows read."""
        assert self.attention is not None
        aim = self.attention / self.layers
        chosen = self.scores.masked_fill(~self.mask, float("-inf")).log_softmax(-1)
        terms = torch.xlogy(aim, aim) - aim * chosen.masked_fill(~self.mask, 0.0)
        return terms.sum(-1).mean()


def _close(group: _Group | None, result: Pass) -> None:
    if group is not None and group.measures:
        result.index_losses.append(group.loss())


def _attend(q: Tensor, k: Tensor, v: Tensor, group: _Group | None) -> Tensor:
    scale = q.shape[-1] ** -0.5
    if group is None:
        return _attend_dense(q, k, v, scale)
    scores = (q @ k.transpose(-1, -2)) * scale
    probabilities = scores.masked_fill(~group.mask.unsqueeze(1), float("-inf")).softmax(-1)
    group.add(probabilities)
    return probabilities @ v


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # torch's fused attention on CPU wants values as wide as keys.
    size = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - size))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :size]
