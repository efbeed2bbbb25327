"""How fast misses cross the host link, measured once at start."""

from time import perf_counter

import torch

from vllm_dhisparse.integration.worker_state import WorkerState
from vllm_dhisparse.runtime.plan import fetch_plan

_ROWS, _TRIES = 4096, 4


def link_bytes_per_ms(worker: WorkerState) -> float:
    """Fetch rows from all over a layer's host memory into staging, as a step does with misses.

    Returns:
        Bytes per millisecond of the fastest try; the first one also wakes the memory up.

    """
    place, staging = worker.places[0], worker.staging
    generator = torch.Generator().manual_seed(0)
    count = min(_ROWS, len(staging))
    rows = torch.randint(worker.tables.sizes.host_rows, (count,), generator=generator)
    rows = torch.unique(rows)  # ascending
    plan = fetch_plan(rows, staging.device)
    unit_blocks = worker.tables.unit_blocks[:, place.latent_group]
    fastest = float("inf")
    for _ in range(_TRIES):
        _wait(staging.device)
        start = perf_counter()
        worker.ops.retrieve(plan, place.kv_cache, unit_blocks, place.host, staging)
        _wait(staging.device)
        fastest = min(fastest, perf_counter() - start)
    staging[: len(rows)].zero_()
    return len(rows) * worker.sizes.row_bytes / (fastest * 1e3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
