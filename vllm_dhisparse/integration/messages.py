"""What scheduler and workers tell each other in a step, beside vLLM's own messages."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_dhisparse.core.commands import StepCommands
from vllm_dhisparse.core.working_set import Usage
from vllm_dhisparse.integration.draft_price import Verified
from vllm_dhisparse.integration.trace_recorder import RecordedStep


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """What one step tells the workers.

    ``ring_blocks``: of draft rings that requests claimed in this step; ``commands``: none
    under residency ``resident``; ``recorded``: under ``record_traces`` who is in the step;
    ``fetch_ms_per_draft``: for adaptive verification, see `core.drafts.FetchPrice`.
    """

    ring_blocks: tuple[int, ...]
    commands: StepCommands | None
    recorded: RecordedStep | None = None
    fetch_ms_per_draft: float = 0.0


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker tells the controller of a step.

    ``fetched_rows``: for decode and verify, by the index group that fetched most; ``usage``:
    of one index group, in a step that is sampled. Under adaptive verification also
    ``link_bytes_per_ms``: of the host link, as measured; ``verified``: None in a step
    without drafts.
    """

    fetched_rows: int
    usage: Usage | None
    link_bytes_per_ms: float = 0.0
    verified: Verified | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Tensor-parallel ranks fetch the same rows; any one's report is all of them."""
        return self
