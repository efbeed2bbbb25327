"""The model with caches: long sequences in pieces, and greedy decoding of whole batches."""

import torch
from torch import Tensor

from tiny_dsa.model import DENSE, MODES, Attention, DsaModel, select

PIECE_TOKENS = 256


class Reader:
    """Reads a batch of sequences of equal length, piece by piece.

    Args:
        model: what reads.
        batch: number of sequences.
        capacity: longest sequence in tokens.
        mode: of `DsaModel`.
        generator: of the random choice of mode ``shuffled``.
        keeps_selections: whether ``selections`` is filled.

    Attributes:
        selections: per leader a list of bool [batch, new tokens, tokens so far].

    Raises:
        ValueError: the mode is unknown.
    """

    def __init__(
        self,
        model: DsaModel,
        batch: int,
        capacity: int,
        mode: str,
        generator: torch.Generator | None = None,
        keeps_selections: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        self._model, self._mode, self._generator = model, mode, generator
        self._cos, self._sin = model.rotary(capacity)
        self._tokens = 0
        config, heads = model.config, model.config["num_attention_heads"]
        key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        count = len(model.layers)
        self._keys = torch.empty(count, batch, heads, capacity, key)
        self._values = torch.empty(count, batch, heads, capacity, config["v_head_dim"])
        self._index_keys = torch.empty(count, batch, capacity, config["index_head_dim"])
        self._keeps_selections = keeps_selections
        self.selections: dict[int, list[Tensor]] = {leader: [] for leader in model.leaders}

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> list[Tensor]:
        """Residual stream after each layer for the next tokens, int64 [batch, new tokens]."""
        pieces = [self._feed(piece) for piece in tokens.split(PIECE_TOKENS, dim=1)]
        return [torch.cat(layer, dim=1) for layer in zip(*pieces, strict=True)]

    def logits(self, hidden: list[Tensor]) -> Tensor:
        """Logits of what `feed` returned."""
        with torch.no_grad():
            return self._model.lm_head(self._model.norm(hidden[-1]))

    def _feed(self, tokens: Tensor) -> list[Tensor]:
        start, end = self._tokens, self._tokens + tokens.shape[1]
        self._tokens = end
        table = self._cos[start:end], self._sin[start:end]
        causal = torch.arange(end) <= torch.arange(start, end)[:, None]
        x = self._model.embed_tokens(tokens)
        mask = causal
        outputs = []
        for number, layer in enumerate(self._model.layers):
            attention: Attention = layer.self_attn
            normed = layer.input_layernorm(x)
            latent, q, k, v = attention.project(normed, table)
            self._keys[number, :, :, start:end] = k
            self._values[number, :, :, start:end] = v
            if attention.indexer is not None and self._mode != DENSE:
                mask = self._select(number, attention, normed, latent, table, causal)
            scores = (q @ self._keys[number, :, :, :end].transpose(-1, -2)) * q.shape[-1] ** -0.5
            weights = scores.masked_fill_(~mask, float("-inf")).softmax(-1)
            x = x + attention.output(weights @ self._values[number, :, :, :end])
            x = x + layer.mlp(layer.post_attention_layernorm(x))[0]
            outputs.append(x)
        return outputs

    def _select(
        self,
        number: int,
        attention: Attention,
        normed: Tensor,
        latent: Tensor,
        table: tuple[Tensor, Tensor],
        causal: Tensor,
    ) -> Tensor:
        assert attention.indexer is not None
        queries, tokens = causal.shape
        q, k, weights = attention.indexer.project(normed, latent, table)
        self._index_keys[number, :, tokens - queries : tokens] = k
        scores = attention.indexer.score(q, self._index_keys[number, :, :tokens], weights)
        scores = scores.masked_fill(~causal, float("-inf"))
        top_k = self._model.config["index_topk"]
        mask = select(scores, causal, self._mode, top_k, self._generator)
        if self._keeps_selections:
            self.selections[number].append(mask)
        return mask.unsqueeze(1)


def greedy(reader: Reader, prompts: Tensor, count: int) -> Tensor:
    """The ``count`` tokens after each prompt [batch, tokens]; end tokens do not stop it.

    Returns:
        int64 [batch, count]; the last of them has not been read.
    """
    hidden = reader.feed(prompts)
    generated = []
    while True:
        generated.append(reader.logits(hidden)[:, -1:].argmax(-1))
        if len(generated) == count:
            return torch.cat(generated, dim=1)
        hidden = reader.feed(generated[-1])
