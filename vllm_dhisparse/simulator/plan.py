"""How much memory a deployment needs, how many requests fit, and what they will fetch."""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.simulator.loads import Phase
from vllm_dhisparse.simulator.run import (
    Settings,
    base_rows,
    curve_for,
    kv_bytes,
    sizes_for,
    staging_bytes,
)


@dataclass(frozen=True)
class Plan:
    """One GPU, or its share of all requests. Sizes in GB = 1e9 bytes.

    Attributes:
        kv_gb: device memory left for KV.
        staging_gb: of verification and decode, beside it.
        host_gb: what the history of the wanted requests takes in host memory.
        requests: wanted on this GPU.
        most_resident: requests whose whole history fits on the device.
        most_by_device: that fit by what they require.
        most_by_host: whose history fits in host memory.
        rows_per_request: rows of a request that the device holds, required and optional.
        held_share: the same as a share of the context.
        fetch_ratio: fetched rows over selected rows to expect in steady state; None where
            the requests do not fit.
        ring_mb: draft KV of a request.

    """

    kv_gb: float
    staging_gb: float
    host_gb: float
    requests: int
    most_resident: int
    most_by_device: int
    most_by_host: int
    rows_per_request: int
    held_share: float
    fetch_ratio: float | None
    ring_mb: float

    @property
    def fits(self) -> bool:
        """Whether all requests can run at a time."""
        return self.requests <= min(self.most_by_device, self.most_by_host)


def plan(settings: Settings, context: int, concurrency: int) -> Plan:
    """Return the plan for requests of one context, spread over the GPUs of the profile.

    Raises:
        ValueError: the weights alone do not fit.

    """
    requests = ceil(concurrency / settings.profile["gpus"])
    load = replace(settings.load, phases=(Phase(1, requests),), contexts=(context,))
    settings = replace(settings, load=load, policy="adaptive")
    model, drafts = settings.model, settings.speculation
    sizes = sizes_for(settings, model)
    queries = drafts.queries
    units = ceil(context / UNIT_ROWS)
    indexer = ceil((context + queries) / sizes.page_tokens)
    tail = ceil(queries / UNIT_ROWS) + 1
    required = (tail + sizes.base_units) * sizes.latent_groups + indexer + sizes.ring_blocks
    resident = (units + tail) * sizes.latent_groups + indexer + sizes.ring_blocks
    page_gb = sizes.page_tokens * model.token_bytes / 1e9
    by_host = int(settings.profile["host_gb"] / (indexer * page_gb))
    by_device = sizes.num_blocks // required
    fixed = (tail * sizes.latent_groups + indexer + sizes.ring_blocks) * requests
    spare = (sizes.num_blocks - fixed) // sizes.latent_groups * UNIT_ROWS
    rows = min(context, max(spare // requests, base_rows(settings, model)))
    fits = requests <= min(by_device, by_host)
    return Plan(
        kv_gb=kv_bytes(settings) / 1e9,
        staging_gb=staging_bytes(settings) / 1e9,
        host_gb=requests * indexer * page_gb,
        requests=requests,
        most_resident=sizes.num_blocks // resident,
        most_by_device=by_device,
        most_by_host=by_host,
        rows_per_request=rows,
        held_share=rows / context,
        fetch_ratio=_fetch_ratio(settings, context, rows) if fits else None,
        ring_mb=sizes.ring_blocks * model.block_bytes / 1e6,
    )


def _fetch_ratio(settings: Settings, context: int, rows: int) -> float:
    if rows >= context:
        return 0.0
    sample, drafts = settings.sample_top_k, settings.speculation
    factor = settings.model.top_k / sample
    curve = curve_for(
        settings.locality, round(context / factor), sample, settings.traces, True, settings.seed
    ).scaled(factor)
    miss = float(curve.at(np.array([float(rows)]), np.zeros(1), is_full=True)[0])
    paid = drafts.accepted + drafts.rejected_price * (drafts.queries - drafts.accepted)
    return miss * paid / drafts.queries
