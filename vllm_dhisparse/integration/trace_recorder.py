"""Recording what the requests of a real serve select, one trace file for each.

The scheduler names the block in which a request's step ends: no two requests write into
one block, so a worker finds the request of each row of its batch by it, in any order.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_dhisparse.core.traces import NO_POSITION, Trace, write_trace
from vllm_dhisparse.integration.kv_spec import is_indexer_spec
from vllm_dhisparse.integration.metadata import DHiSparseMetadata
from vllm_dhisparse.runtime.plan import SparseQuery

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_dhisparse.integration.layers import LayerPath

logger = init_logger("vllm.dhisparse")


@dataclass(frozen=True)
class RecordedStep:
    """``request_of_block``: by the block of the step's last token; ``ended``: requests."""

    request_of_block: Mapping[int, str]
    ended: frozenset[str]


def recorded_step(output: "SchedulerOutput", manager: "KVCacheManager") -> RecordedStep:
    """Return what workers need to record the step."""
    managers = manager.coordinator.single_type_managers
    address = next((m for m in managers if is_indexer_spec(m.kv_cache_spec)), managers[0])
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    request_of_block = {}
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        last = (computed[request_id] + num_tokens - 1) // address.block_size
        block = address.req_to_blocks[request_id][last].block_id
        request_of_block[block] = request_id
    return RecordedStep(request_of_block, frozenset(output.finished_req_ids))


@dataclass
class _Recording:
    """Steps of one request: first position, and selections by index group."""

    first: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    selections: list[dict[int, np.ndarray]] = field(default_factory=list)
    part: int = 0


class TraceRecorder:
    """Collects selections of decode and verify steps, and writes them when a request ends.

    A request that is computed again from the start, or that skips tokens, goes on in a
    file of its own.

    Args:
        folder: made if it is not there.
        model: name for the files.

    """

    def __init__(self, folder: Path, model: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._model = model
        self._step = RecordedStep({}, frozenset())
        self._open: dict[str, _Recording] = {}
        logger.info("DHISPARSE records selections in %s; this slows every step", folder)

    def begin_step(self, step: RecordedStep) -> None:
        """Write who ended; the layers of the step come next."""
        for request_id in step.ended & self._open.keys():
            self._write(request_id)
            del self._open[request_id]
        self._step = step

    def record(self, group: int, selected: torch.Tensor, batch: DHiSparseMetadata) -> None:
        """Keep one index group's selection.

        Args:
            group: number of the leader.
            selected: [num_tokens, index_topk] int32, -1 = unused place.
            batch: as the group with the pages of all history sees it.

        """
        starts = batch.query_start_loc.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            if end == start or bool(batch.is_prefill[row]):
                continue
            length = int(batch.seq_lens[row])
            block = int(batch.block_table[row, (length - 1) // batch.block_size])
            request_id = self._step.request_of_block.get(block)
            if request_id is None:
                continue  # a step without a request, as warm-up has
            self._add(request_id, group, length - (end - start), selected[start:end])

    def close(self) -> None:
        """Write the requests that still run."""
        for request_id in self._open:
            self._write(request_id)
        self._open.clear()

    def _add(self, request_id: str, group: int, first: int, selected: torch.Tensor) -> None:
        recording = self._open.setdefault(request_id, _Recording())
        if not recording.first or recording.first[-1] != first:
            if recording.first and not (
                recording.first[-1] < first <= recording.first[-1] + recording.queries[-1]
            ):
                self._write(request_id)
                recording = self._open[request_id] = _Recording(part=recording.part + 1)
            recording.first.append(first)
            recording.queries.append(len(selected))
            recording.selections.append({})
        recording.selections[-1][group] = selected.to("cpu", torch.int32).numpy().copy()

    def _write(self, request_id: str) -> None:
        recording = self._open[request_id]
        groups = sorted({group for step in recording.selections for group in step})
        top_k = recording.selections[0][groups[0]].shape[1]
        shape = len(recording.first), len(groups), max(recording.queries), top_k
        positions = np.full(shape, NO_POSITION, dtype=np.int32)
        for step, selections in enumerate(recording.selections):
            for place, group in enumerate(groups):
                chosen = selections[group]
                positions[step, place, : len(chosen)] = chosen
        context = np.array(recording.first, dtype=np.int64)
        accepted = np.append(np.diff(context), 1)  # what the last step added is not known here
        meta = {"model": self._model, "source": "recorded while serving", "request": request_id}
        name = re.sub(r"[^\w.-]+", "_", request_id)
        suffix = f"-{recording.part}" if recording.part else ""
        write_trace(self._folder / f"{name}{suffix}.npz", Trace(positions, context, accepted, meta))


class RecordingLayer:
    """A leader's way of its rows, with a look at what it selects.

    Args:
        path: the way.
        recorder: of this worker.
        group: number of the leader.
        batch: returns the batch as the group with the pages of all history sees it.

    """

    def __init__(
        self,
        path: "LayerPath",
        recorder: TraceRecorder,
        group: int,
        batch: Callable[[DHiSparseMetadata], DHiSparseMetadata],
    ) -> None:
        self._path = path
        self._recorder = recorder
        self._group = group
        self._batch = batch

    def publish(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """As the path does."""
        self._path.publish(rows, slots)

    def attend(self, asked: SparseQuery, metadata: DHiSparseMetadata) -> torch.Tensor:
        """As the path does, after a look at what is selected."""
        self._recorder.record(self._group, asked.remap, self._batch(metadata))
        return self._path.attend(asked, metadata)


def record_leaders(
    layers: Mapping[str, Any],
    recorder: TraceRecorder,
    batch: Callable[[DHiSparseMetadata], DHiSparseMetadata],
) -> None:
    """Let the recorder look at all leaders, which are in model order."""
    leaders = [layer.impl for layer in layers.values() if layer.impl.is_leader]
    for group, leader in enumerate(leaders):
        leader.path = RecordingLayer(leader.path, recorder, group, batch)
