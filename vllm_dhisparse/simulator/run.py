"""A run from its settings: sizes of pool and pages, streams, engine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Literal

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.core.traces import read_trace
from vllm_dhisparse.simulator.curves import MissCurve, miss_curve
from vllm_dhisparse.simulator.engine import Engine, Step
from vllm_dhisparse.simulator.fidelity import Fidelity
from vllm_dhisparse.simulator.fluid import Fluid
from vllm_dhisparse.simulator.geometry import ModelGeometry
from vllm_dhisparse.simulator.loads import Load
from vllm_dhisparse.simulator.memory import Memory, PolicyName, Sizes
from vllm_dhisparse.simulator.profiles import Profile
from vllm_dhisparse.simulator.rows import Rows
from vllm_dhisparse.simulator.speculation import NONE, Speculation
from vllm_dhisparse.simulator.step_time import Roofline
from vllm_dhisparse.simulator.streams import Templates, recorded, synthetic

FidelityName = Literal["rows", "fluid"]
TEMPLATES = 4
_LARGEST_TOP_K, _LEAST_TOP_K, _CONTEXT = 160, 16, 8192
_CURVE_STEPS = 1024


@dataclass(frozen=True)
class Settings:
    """All that decides a run.

    Attributes:
        profile, model, policy, speculation, fidelity: as they say.
        load: of one GPU, contexts in tokens of the model.
        locality: of generated selections, see ``locality.LOCALITIES``.
        traces: files of recorded selections, instead of generated ones. Contexts of the load
            are then those of the files, in units of their top_k.
        index_groups: whose rows are followed under ``rows``.
        fixed_factor: rows of a request under ``fixed``, in units of top_k.
        base_factor: under ``adaptive``.
        fluid_top_k: size at which ``fluid`` runs, 0 = that of the model.
        kv_gb: device memory for KV, None = what the profile leaves.
        max_requests: running at a time on one GPU.
        seed: of selections, acceptance, placement.
        checks: whether every step is checked against plain arithmetic.

    """

    profile: Profile
    model: ModelGeometry
    load: Load
    policy: PolicyName = "adaptive"
    speculation: Speculation = NONE
    fidelity: FidelityName = "fluid"
    locality: str = "ordinary"
    traces: tuple[Path, ...] = ()
    index_groups: int = 1
    fixed_factor: int = 2
    base_factor: int = 1
    fluid_top_k: int = 0
    kv_gb: float | None = None
    max_requests: int = 1024
    seed: int = 0
    checks: bool = False

    @property
    def sample_top_k(self) -> int:
        """Rows of a simulated selection: as large as contexts of about 8K allow."""
        if self.traces:
            return read_trace(self.traces[0]).top_k
        wanted = self.model.top_k * _CONTEXT // max(self.load.contexts)
        return max(_LEAST_TOP_K, min(_LARGEST_TOP_K, wanted))


def kv_bytes(settings: Settings) -> float:
    """Device memory for KV on one GPU, after weights, reserve and staging.

    Raises:
        ValueError: nothing is left.

    """
    if settings.kv_gb is not None:
        return settings.kv_gb * 1e9
    profile, model, drafts = settings.profile, settings.model, settings.speculation
    gpus = int(profile["gpus"])
    left = profile["memory_gb"] * profile["memory_utilization"] * 1e9
    left -= (model.weights_gb(gpus) + drafts.weights_gb + profile["reserve_gb"]) * 1e9
    left -= staging_bytes(settings)
    if left <= 0:
        raise ValueError(
            f"{model.name} does not fit on {gpus} GPUs of {profile['memory_gb']:.0f} GB: "
            f"{-left / 1e9:.1f} GB are missing before any KV"
        )
    return left


def staging_bytes(settings: Settings) -> float:
    """Two areas of one layer, for all queries of the largest step; none if all is resident."""
    if settings.policy == "resident":
        return 0.0
    most = max(phase.concurrency for phase in settings.load.phases) or settings.max_requests
    rows = min(most, settings.max_requests) * settings.speculation.queries * settings.model.top_k
    return 2.0 * rows * settings.model.row_bytes


def sizes_for(settings: Settings, model: ModelGeometry) -> Sizes:
    """Return pool and pages of one GPU for a model, scaled or not."""
    num_blocks = int(kv_bytes(settings) // model.block_bytes)
    page_bytes = model.page_tokens * model.token_bytes
    num_pages = int(settings.profile["host_gb"] * 1e9 // page_bytes)
    if settings.policy == "resident":
        num_pages = num_blocks
    drafts = settings.speculation
    rows = base_rows(settings, model)
    return Sizes(
        num_blocks=num_blocks,
        num_pages=min(num_pages, num_blocks),  # a page needs an indexer block
        page_tokens=model.page_tokens,
        latent_groups=model.latent_groups,
        base_units=ceil(rows / UNIT_ROWS),
        ring_blocks=ceil(drafts.ring_rows * drafts.row_bytes / model.block_bytes),
    )


def base_rows(settings: Settings, model: ModelGeometry) -> int:
    """Rows that a request requires outside its tail."""
    match settings.policy:
        case "resident":
            return 0
        case "adaptive":
            return settings.base_factor * model.top_k
        case "fixed":
            return settings.fixed_factor * model.top_k
        case "page_tail":  # vLLM's default: a query more than the step has
            return (settings.speculation.queries + 1) * model.top_k


def controller_for(settings: Settings, sizes: Sizes, scale: float) -> ResidencyController:
    """Return the controller with the package's defaults; bounds on rows follow the scale."""
    queries = settings.speculation.queries
    most = min(max(p.concurrency for p in settings.load.phases) or 256, settings.max_requests)
    tokens = most * queries
    reserve = ceil(tokens / UNIT_ROWS) * sizes.latent_groups + ceil(tokens / sizes.page_tokens)
    defaults = ResidencyController(head_reserve_blocks=0)
    return replace(
        defaults,
        head_reserve_blocks=reserve + sizes.base_units * sizes.latent_groups,
        adopt_units_per_step=max(1, round(defaults.adopt_units_per_step / scale)),
        restore_rows_per_step=round(defaults.restore_rows_per_step / scale),
    )


def templates_for(settings: Settings) -> Templates:
    """Return the streams of a run."""
    if settings.traces:
        return recorded([read_trace(path) for path in settings.traces], settings.index_groups)
    top_k = settings.sample_top_k
    factor = settings.model.top_k / top_k
    contexts = sorted({round(context / factor) for context in settings.load.contexts})
    drafts = settings.speculation.queries - 1
    steps = _CURVE_STEPS
    if settings.fidelity == "rows":
        steps = max(steps, settings.load.output_tokens + 2 * drafts + 257)
    streams = []
    for context in contexts:
        made = synthetic(
            settings.locality,
            context,
            steps,
            top_k,
            max(1, TEMPLATES // len(contexts)),
            settings.index_groups,
            settings.seed,
        )
        streams += made.streams
    return Templates(streams)


@cache
def curve_for(
    locality: str,
    context: int,
    top_k: int,
    traces: tuple[Path, ...],
    keeps_written: bool,
    seed: int,
) -> MissCurve:
    """Return the miss curve of generated or recorded selections."""
    if traces:
        return miss_curve(recorded([read_trace(path) for path in traces], 1), keeps_written)
    made = synthetic(locality, context, _CURVE_STEPS, top_k, TEMPLATES, 1, seed)
    return miss_curve(made, keeps_written)


def build(settings: Settings) -> Engine:
    """Return an engine that has done nothing yet."""
    sample = settings.sample_top_k
    factor = settings.model.top_k / sample
    keeps = settings.policy == "adaptive"
    size = sample if settings.fidelity == "rows" else settings.fluid_top_k or settings.model.top_k
    model = settings.model.scaled(size) if size != settings.model.top_k else settings.model
    contexts = tuple(round(context / model.scale) for context in settings.load.contexts)
    sizes = sizes_for(settings, model)
    fidelity: Fidelity
    if settings.fidelity == "rows":
        templates = templates_for(settings)
        if settings.traces:
            contexts = tuple(sorted(set(templates.contexts)))
        fidelity = Rows(
            templates, sizes, settings.seed, settings.policy != "page_tail", settings.checks
        )
    else:
        context = round(max(settings.load.contexts) / factor)
        curve = curve_for(settings.locality, context, sample, settings.traces, keeps, settings.seed)
        fidelity = Fluid(
            curve.scaled(size / sample),
            size,
            settings.speculation.rejected_price,
            settings.policy == "resident",
            settings.policy != "page_tail",
        )
    controller = None
    if settings.policy == "adaptive":
        controller = controller_for(settings, sizes, model.scale)
    return Engine(
        replace(settings.load, contexts=contexts),
        Memory(sizes, settings.policy, controller),
        fidelity,
        Roofline(settings.profile, model),
        settings.speculation,
        model.scale,
        settings.seed,
        settings.max_requests,
        settings.checks,
    )


def simulate(settings: Settings) -> Iterator[Step]:
    """Do a run, one step at a time."""
    return build(settings).run()
