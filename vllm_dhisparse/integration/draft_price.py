"""The price of a verified draft: one for all ranks, made by the scheduler, sent with a step."""

from typing import TYPE_CHECKING, NamedTuple

from vllm_dhisparse.core.drafts import FetchEstimate

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_dhisparse.integration.messages import WorkerReport


class Verified(NamedTuple):
    """What a worker verified in a step: requests with drafts, and their drafts together."""

    requests: int
    drafts: int


class DraftPrice:
    """What one more draft is expected to take on the host link.

    Args:
        row_bytes: of one row in all latent layers.

    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._link_bytes_per_ms = 0.0
        self._estimate = FetchEstimate()
        self._reported = Verified(0, 0)
        self._fetched_rows = 0
        self._num_output_tokens: dict[str, int] = {}
        """Of requests whose drafts were scheduled in the step before."""

    def note_report(self, report: "WorkerReport") -> None:
        """Note what a worker says of its last step."""
        self._reported = report.verified or Verified(0, 0)
        self._fetched_rows = report.fetched_rows
        self._link_bytes_per_ms = report.link_bytes_per_ms

    def next_ms(self, scheduler_output: "SchedulerOutput") -> float:
        """Return the milliseconds of a draft; once a step, 0 as long as nothing is known."""
        cached = scheduler_output.scheduled_cached_reqs
        now = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        accepted = sum(
            max(0, now[request] - before - 1)
            for request, before in self._num_output_tokens.items()
            if request in now
        )
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._num_output_tokens = {name: now[name] for name in drafts if name in now}
        if self._reported.drafts:
            self._estimate.observe(*self._reported, accepted, self._fetched_rows)
        self._reported = Verified(0, 0)  # a report counts once
        if not self._link_bytes_per_ms:
            return 0.0
        price = self._estimate.price(self._row_bytes, self._link_bytes_per_ms)
        return 0.0 if price is None else price.ms_per_draft
