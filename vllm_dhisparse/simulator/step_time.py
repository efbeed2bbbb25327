"""How long a step takes: a roofline of its parts.

The parts add up, but for reading weights and computing with them, which overlap. Absolute
times are 1.2 to 4 times shorter than the few published ones; only ratios between runs of one
profile are of use.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_dhisparse.simulator.geometry import ModelGeometry
from vllm_dhisparse.simulator.profiles import Profile

_SMOOTHING = 4  # of the larger of two overlapping times


class StepLoad(NamedTuple):
    """One GPU's step: ``requests``; ``queries`` of all; ``context_tokens``, sum over requests;
    ``fetched_rows``, ``restored_rows`` of a mean index group, in tokens of the real model;
    whether history ``is_on_host``, and whether drafts are proposed (``has_drafts``)."""

    requests: int
    queries: int
    context_tokens: float
    fetched_rows: float
    restored_rows: float
    is_on_host: bool
    has_drafts: bool


class StepParts(NamedTuple):
    """Milliseconds. ``restore``: what restoring takes beyond the rest of the step, beside which
    it runs."""

    overhead: float
    linear: float
    attention: float
    indexer: float
    exchange: float
    fetch: float
    resolve: float
    draft: float
    restore: float

    @property
    def total(self) -> float:
        """Milliseconds of the step."""
        return sum(self)


class Hardware(Protocol):
    """What the engine asks of a machine."""

    def step(self, load: StepLoad) -> StepParts:
        """Return the time of a step."""
        ...


@dataclass(frozen=True)
class Roofline:
    """A model on a machine. All formulas per GPU."""

    profile: Profile
    model: ModelGeometry

    def step(self, load: StepLoad) -> StepParts:
        """Return the time of a step, by parts."""
        if not load.requests:
            return StepParts(self.profile["overhead_ms"], 0, 0, 0, 0, 0, 0, 0, 0)
        p, factor = self.profile, self.profile["kernel_factor"]
        link_ms_per_row = self._fetched_row_bytes / (p["link_gb_s"] * 1e6)
        parts = StepParts(
            overhead=p["overhead_ms"],
            linear=self._linear(load.queries),
            attention=factor * self._attention(load.queries),
            indexer=factor * self._indexer(load),
            exchange=factor * self._exchange(load.queries),
            fetch=load.fetched_rows * link_ms_per_row * (1 - p["hidden_share"]),
            resolve=self.model.index_groups * p["resolve_us"] / 1e3 if load.is_on_host else 0.0,
            draft=p["draft_ms"] if load.has_drafts else 0.0,
            restore=0.0,
        )
        on_link = (load.fetched_rows + load.restored_rows) * link_ms_per_row
        return parts._replace(restore=max(0.0, on_link - parts.total))

    @property
    def _fetched_row_bytes(self) -> float:
        # A simulated row may stand for several; loads count rows of the real model.
        return self.model.token_bytes / self.model.scale

    def _linear(self, queries: int) -> float:
        p, m = self.profile, self.model
        chosen = 1 - (1 - m.experts_per_token / m.experts) ** (queries * p["gpus"])
        gigabytes = m.shared_gb + m.routed_gb / p["gpus"] * chosen
        read = gigabytes / (p["bandwidth_gb_s"] * p["weight_efficiency"]) * 1e3
        flops = 2 * m.active_params * queries
        compute = flops / (p["fp8_tflops"] * 1e12 * p["compute_efficiency"]) * 1e3
        return float((read**_SMOOTHING + compute**_SMOOTHING) ** (1 / _SMOOTHING))

    def _attention(self, queries: int) -> float:
        p, m = self.profile, self.model
        rows = queries * m.top_k * m.attention_layers
        row_bytes = m.row_bytes * m.latent_layers / m.attention_layers
        if m.latent_layers > 1:
            row_bytes = m.row_bytes
        read = rows * row_bytes * p["attention_reuse"]
        read /= p["bandwidth_gb_s"] * 1e9 * p["attention_bandwidth_efficiency"]
        real_rows = rows * m.scale
        flops = real_rows * m.heads * (m.latent_values + m.value_size) * 2
        return max(read, flops / (p["bf16_tflops"] * 1e12 * p["attention_efficiency"])) * 1e3

    def _indexer(self, load: StepLoad) -> float:
        p, m = self.profile, self.model
        tokens = load.context_tokens  # of the real model
        speed = p["bandwidth_gb_s"] * 1e9 * p["indexer_bandwidth_efficiency"]
        read = tokens * m.indexer_bytes / m.scale / speed
        per_query = tokens / load.requests * m.index_groups * load.queries
        flops = 2 * m.index_heads * m.index_head_dim * per_query
        scores = per_query * 4 * 3 / speed  # written once, read twice by the top-k
        return (
            max(read, flops / (p["fp8_tflops"] * 1e12 * p["indexer_efficiency"])) + scores
        ) * 1e3

    def _exchange(self, queries: int) -> float:
        p, m = self.profile, self.model
        targets = min(0.65 * m.experts_per_token, 0.65 * p["gpus"])
        moved = queries * m.hidden * 3 * targets / (p["all_to_all_gb_s"] * 1e9) * 1e3
        return m.moe_layers * (p["all_to_all_us"] / 1e3 + moved)
