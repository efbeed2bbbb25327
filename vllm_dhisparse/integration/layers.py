"""What one attention layer does with its rows, by residency."""

from typing import Any, Protocol

import torch

from vllm_dhisparse.integration.row_counters import RowCounters
from vllm_dhisparse.integration.worker_state import LayerPlace, WorkerState
from vllm_dhisparse.runtime.ops import DataPlane
from vllm_dhisparse.runtime.plan import SparseQuery
from vllm_dhisparse.runtime.scratch import Scratch


class RowAttention(Protocol):
    """Sparse MLA over rows by index."""

    def attend(self, asked: SparseQuery, metadata: Any) -> torch.Tensor:
        """See ``runtime.ops.DataPlane.attend``; ``metadata`` is the batch's, of this step."""
        ...


class PlaneAttention:
    """The data plane's own attention."""

    def __init__(self, ops: DataPlane, scratch: Scratch) -> None:
        self._ops = ops
        self._scratch = scratch

    def attend(self, asked: SparseQuery, metadata: Any) -> torch.Tensor:
        """See ``RowAttention``."""
        return self._ops.attend(*asked, self._scratch)


class LayerPath(Protocol):
    """The way of one layer's rows; given to the layer once its KV cache stands."""

    def publish(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Note the rows that vLLM's slot mapping has just written.

        Args:
            rows: [num_tokens, row_size].
            slots: [num_tokens] int64 - ``block * block_size + offset``, -1 = padding.

        """
        ...

    def attend(self, asked: SparseQuery, metadata: Any) -> torch.Tensor:
        """Attend to the selected rows.

        Args:
            asked: ``rows``: [num_blocks, block_size, row_size], the layer's KV cache;
                ``remap``: [num_tokens, index_topk] int32 - positions, -1 = unused place.
            metadata: the batch, of the worker's device.

        Returns:
            [num_tokens, num_heads, value_size] in the query's dtype.

        """
        ...


class ResidentLayer:
    """All rows lie in vLLM's own blocks."""

    def __init__(
        self, attention: RowAttention, counters: RowCounters, index_group: int, is_leader: bool
    ) -> None:
        self._attention = attention
        self._counters = counters
        self._index_group = index_group
        self._is_leader = is_leader

    def publish(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Nothing: the row is where it stays."""

    def attend(self, asked: SparseQuery, metadata: Any) -> torch.Tensor:
        """Attend through the block table."""
        if self._is_leader:
            self._counters.add_resident(asked.remap, metadata, self._index_group)
        physical = metadata.physical_rows(asked.remap)
        return self._attention.attend(asked._replace(remap=physical), metadata)


class HierarchyLayer:
    """Rows live in host memory; the device holds tails and the row cache.

    Args:
        worker: shared by all layers.
        place: of this layer.
        is_leader: whether the layer's indexer makes the selection.

    """

    def __init__(self, worker: WorkerState, place: LayerPlace, is_leader: bool) -> None:
        self._worker = worker
        self._place = place
        self._is_leader = is_leader

    def publish(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the rows through to their home; a leader enters them in the map."""
        worker = self._worker
        host_rows = worker.step_inputs().host_rows
        worker.ops.publish(rows, host_rows, self._place.host)
        if self._is_leader:
            worker.ops.enter(
                slots, self._place.latent_group, host_rows, worker.tables, self._place.index_group
            )

    def attend(self, asked: SparseQuery, metadata: Any) -> torch.Tensor:
        """Resolve (leaders), then retrieve and attend for each plan."""
        worker, place = self._worker, self._place
        role = place.index_group, self._is_leader
        worker.counters.start_clock(*role)
        if self._is_leader:
            worker.resolve(asked.remap, place.index_group)
        assert worker.resolution is not None
        answers: list[torch.Tensor] = []
        for plan in worker.resolution.plans:
            if answers:
                worker.counters.start_clock(*role)
            rows, index = worker.retrieve(plan, place)
            worker.counters.stop_clock(metadata, *role)
            part = asked.query[plan.first : plan.last]
            read = asked._replace(query=part, rows=rows, remap=index)
            answers.append(worker.attention.attend(read, metadata))
        return answers[0] if len(answers) == 1 else torch.cat(answers)
