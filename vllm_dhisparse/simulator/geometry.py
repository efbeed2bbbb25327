"""Sizes of models, as data, and the device memory that their parts take."""

from dataclasses import dataclass, fields, replace
from importlib.resources import files
from math import ceil
from tomllib import loads
from typing import Any

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.page_plan import plan_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """What the simulator needs to know of a model. Sizes in bytes, GB = 1e9.

    Attributes:
        name: of the model and its KV format.
        source: where the numbers are from.
        top_k: rows that a query selects in an index group.
        row_bytes: one latent row in one layer.
        latent_layers: layers that keep latent rows.
        attention_layers: layers that read them; more where layers share rows.
        index_groups: leaders, each with its own selection.
        indexer_bytes: indexer keys of one token, all leaders.
        latent_groups: latent KV groups of vLLM's plan.
        indexer_block_tokens: tokens of an indexer block; 0 = as `core.page_plan` says.
        shared_gb, routed_gb: weights on every GPU, and those of experts in all.
        active_params: parameters that a token passes.
        experts, experts_per_token, moe_layers, hidden, heads: of the network.
        latent_values, value_size: of a row in attention.
        index_heads, index_head_dim: of the indexer.

    """

    name: str
    source: str
    top_k: int
    row_bytes: int
    latent_layers: int
    attention_layers: int
    index_groups: int
    indexer_bytes: int
    latent_groups: int
    indexer_block_tokens: int = 0
    shared_gb: float
    routed_gb: float
    active_params: float
    experts: int
    experts_per_token: int
    moe_layers: int
    hidden: int
    heads: int
    latent_values: int
    value_size: int
    index_heads: int
    index_head_dim: int
    scale: float = 1.0
    """Tokens of the real model that one simulated token stands for; see ``scaled``."""

    @property
    def token_bytes(self) -> int:
        """Latent bytes of one token in all layers."""
        return self.row_bytes * self.latent_layers

    @property
    def block_bytes(self) -> int:
        """Device bytes of one block: the pages of all layers of a KV group."""
        if self.indexer_block_tokens:
            page = UNIT_ROWS * self.row_bytes
        else:
            page = plan_pages(self.row_bytes, self.indexer_bytes // self.index_groups).page_bytes
        return page * ceil(self.latent_layers / self.latent_groups)

    @property
    def page_tokens(self) -> int:
        """Tokens of an indexer block, and of a host page."""
        if self.indexer_block_tokens:
            return self.indexer_block_tokens
        plan = plan_pages(self.row_bytes, self.indexer_bytes // self.index_groups)
        return plan.indexer_block_tokens

    def weights_gb(self, gpus: int) -> float:
        """Weights on one of ``gpus`` GPUs that share the experts."""
        return self.shared_gb + self.routed_gb / gpus

    def scaled(self, top_k: int) -> "ModelGeometry":
        """Return the model with fewer, larger rows: ``top_k`` rows of the same total bytes.

        The miss curve in units of top_k hardly depends on top_k at an equal share of the
        context, so exact rows can be simulated at a size that suits a laptop. Contexts are to
        be divided by ``scale``.
        """
        factor = self.top_k / top_k
        return replace(
            self,
            top_k=top_k,
            row_bytes=round(self.row_bytes * factor),
            indexer_bytes=round(self.indexer_bytes * factor / self.index_groups)
            * self.index_groups,
            scale=self.scale * factor,
        )


def load_models() -> dict[str, ModelGeometry]:
    """Read all model geometries of the package."""
    text = (files("vllm_dhisparse.simulator") / "data" / "models.toml").read_text()
    known = {field.name for field in fields(ModelGeometry)} - {"name"}
    models: dict[str, ModelGeometry] = {}
    for name, values in loads(text).items():
        base: dict[str, Any] = {}
        if "like" in values:
            like = models[values.pop("like")]
            base = {key: getattr(like, key) for key in known}
        assert set(values) <= known, (name, set(values) - known)
        models[name] = ModelGeometry(name=name, **{**base, **values})
    return models


def model_named(name: str) -> ModelGeometry:
    """Return a model geometry.

    Raises:
        ValueError: there is none of this name; the message lists those there are.

    """
    models = load_models()
    if name not in models:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(models)}")
    return models[name]
