"""Small histograms of what a step used, for the scheduler and the metrics."""

import torch

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.core.working_set import Usage
from vllm_dhisparse.runtime.plan import Phase, Queries, Resolution
from vllm_dhisparse.runtime.tables import NO_ROW, UNIT_ROWS, Tables

_AGES = MAX_AGE + 1


class UsageProbe:
    """Looks at one index group before and after its ``resolve``; costs a walk over its slots."""

    def __init__(self, tables: Tables, index_group: int) -> None:
        group = tables.group(index_group)
        cache = tables.unit_state >= UnitState.REQUIRED
        self._held = cache.repeat_interleave(UNIT_ROWS) & (group.row_of_slot != NO_ROW)
        self._age = group.age.clone()

    def take(self, selected: torch.Tensor, queries: Queries, resolution: Resolution) -> Usage:
        """Return what the step used.

        Args:
            selected: [num_tokens, top_k] int32, as given to ``resolve``.
            queries: who asked.
            resolution: the answer.

        """
        found = torch.unique(
            torch.cat([plan.slot[~plan.fetch] for plan in resolution.plans])
        ).long()
        found = found[self._held[found]]  # not those in tails, nor fetched by an earlier pass
        return Usage(
            _histogram(self._age[found]),
            _histogram(self._age[self._held]),
            int(resolution.fetched[Phase.GENERATION]),
            union_rows(selected, queries),
        )


def union_rows(selected: torch.Tensor, queries: Queries) -> tuple[int, ...]:
    """Return the distinct positions that each request reads, prefill apart.

    Args:
        selected: [num_tokens, top_k] int32 - negative and invisible positions select nothing.
        queries: who asks; all tokens of a request lie together.

    """
    valid = (selected >= 0) & (selected < queries.visible[:, None])
    requests, counts = torch.unique_consecutive(queries.request_of_token, return_counts=True)
    first, sizes = 0, []
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        tokens = slice(first, first + count)
        first += count
        if request >= 0 and not queries.is_prefill[request]:
            sizes.append(torch.unique(selected[tokens][valid[tokens]]).numel())
    return tuple(sizes)


def _histogram(age: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.bincount(age, minlength=_AGES).tolist())
