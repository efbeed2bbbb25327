"""What a DSA model computes, by transformers: an implementation that shares nothing with vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from stable_topk import Selection, StableTopk
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

# Bounds the [heads, chunk, context] intermediates of eager attention.
CHUNK_TOKENS = 512


class TransformersOracle:
    """A model folder in float32 with eager attention and this project's tie rule.

    Each call computes one sequence from its first token. Ties at the boundary of the
    top-k break by position, the lower one wins.

    Args:
        directory: model folder with local files.
        dense: select every row, so that the model is one with ordinary attention.

    Raises:
        RuntimeError: the code of transformers is not the one this class was written
            for, or the checkpoint does not fit the model exactly.
    """

    def __init__(self, directory: Path | str, *, dense: bool = False) -> None:
        # By class: vLLM, once imported, puts configurations of its own into the Auto tables.
        config_class, model_class = _CLASSES[_model_type(Path(directory))]
        config = config_class.from_pretrained(directory, local_files_only=True)
        if dense:
            config.index_topk = config.max_position_embeddings
        model, loading = model_class.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
        if any(loading.values()):
            raise RuntimeError(f"the checkpoint does not fit the model: {loading}")
        self._model: Any = model.eval()
        self._indexers = {
            layer: StableTopk(decoder.self_attn.indexer)
            for layer, decoder in enumerate(self._decoders)
            if decoder.self_attn.indexer is not None
        }

    @property
    def leader_layers(self) -> tuple[int, ...]:
        """The layers that own an indexer, ascending."""
        return tuple(self._indexers)

    def greedy(self, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The ``num_tokens`` tokens after the prompt; end tokens do not stop it."""
        cache = DynamicCache(config=self._model.config)
        new = list(prompt_token_ids)
        generated: list[int] = []
        while len(generated) < num_tokens:
            logits = self._forward(new, cache)
            new = [int(logits[-1].argmax())]
            generated += new
        return generated

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities of the token after each position: float32 [tokens, vocabulary]."""
        return self._forward(token_ids).log_softmax(dim=-1)

    def layer_outputs(self, token_ids: Sequence[int]) -> list[Tensor]:
        """The residual stream after each decoder layer: float32 [tokens, hidden] each."""
        outputs: list[list[Tensor]] = [[] for _ in self._decoders]

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                outputs[layer].append(hidden[0])

            return hook

        hooks = [d.register_forward_hook(keep(i)) for i, d in enumerate(self._decoders)]
        try:
            self._forward(token_ids)
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.cat(chunks) for chunks in outputs]

    def selections(self, token_ids: Sequence[int]) -> dict[int, Tensor]:
        """What each leader layer selects: ascending positions, padded with -1.

        Returns:
            int64 [tokens, min(index_topk, tokens)] by layer.
        """
        recorded = self._record(token_ids)
        return {layer: _stack([s.positions for s in passes]) for layer, passes in recorded.items()}

    def selection_margin(self, token_ids: Sequence[int]) -> float:
        """How wrong index scores may be before a selection differs from this one.

        Selecting is discrete: an implementation that rounds otherwise swaps rows whose
        scores are closer than its error, and all that follows then differs visibly.
        Compare log-probabilities on sequences whose margin is well above that error.
        """
        return min(s.margin for passes in self._record(token_ids).values() for s in passes)

    @property
    def _decoders(self) -> list[Any]:
        return list(self._model.model.layers)

    def _record(self, token_ids: Sequence[int]) -> dict[int, list[Selection]]:
        for indexer in self._indexers.values():
            indexer.record = []
        try:
            self._forward(token_ids)
            return {layer: indexer.record or [] for layer, indexer in self._indexers.items()}
        finally:
            for indexer in self._indexers.values():
                indexer.record = None

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[int], cache: DynamicCache | None = None) -> Tensor:
        """Logits [tokens, vocabulary] of the tokens, which follow those in ``cache``."""
        if cache is None:
            cache = DynamicCache(config=self._model.config)
        calls = [indexer.calls for indexer in self._indexers.values()]
        chunks = torch.tensor([list(token_ids)]).split(CHUNK_TOKENS, dim=1)
        logits = [
            self._model(chunk, past_key_values=cache, use_cache=True).logits[0] for chunk in chunks
        ]
        expected = [n + len(chunks) for n in calls]
        if expected != [indexer.calls for indexer in self._indexers.values()]:
            raise RuntimeError("an indexer did not run once per forward pass")
        return torch.cat(logits)


def _stack(chunks: Sequence[Tensor]) -> Tensor:
    width = max(chunk.shape[1] for chunk in chunks)
    return torch.cat([nn.functional.pad(c, (0, width - c.shape[1]), value=-1) for c in chunks])


_CLASSES: dict[str, Any] = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}


def _model_type(directory: Path) -> str:
    return str(json.loads((directory / "config.json").read_text())["model_type"])
