"""Drafts cut to what memory has room for, before vLLM schedules their verification."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_dhisparse.core.drafts import draft_limit


class GrowingTables(NamedTuple):
    """Block tables that grow with their requests, of groups that grow alike.

    ``tables``: of one group, by request; ``num_groups``: how many grow with it.
    """

    tables: Mapping[str, Sequence[KVCacheBlock]]
    block_tokens: int
    num_groups: int


class DraftLengths:
    """Draft tokens that running requests bring into the next step.

    vLLM takes the drafts of a request as they stand when it schedules it, whichever runner
    and scheduling made them, and the worker verifies as many as were scheduled.

    Args:
        tables: of all groups that grow.
        num_drafts: draft tokens of a request at most.
        num_lookahead_tokens: vLLM's slots beyond the scheduled tokens.
        max_step_tokens: vLLM's bound on the tokens of a step.
        max_model_len: tokens of a request at most.

    """

    def __init__(
        self,
        tables: Sequence[GrowingTables],
        num_drafts: int,
        num_lookahead_tokens: int,
        max_step_tokens: int,
        max_model_len: int,
    ) -> None:
        self.limit = self._num_drafts = num_drafts
        """Draft tokens that each request may have in this step."""
        self._tables = tables
        self._num_lookahead_tokens = num_lookahead_tokens
        self._max_step_tokens = max_step_tokens
        self._max_model_len = max_model_len
        self._running: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Note an admitted request."""
        self._running[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones are fine."""
        self._running.pop(request_id, None)

    def cut(self, free_blocks: int, waiting_blocks: int) -> None:
        """Shorten the drafts of all running requests to what `draft_limit` allows.

        Args:
            free_blocks: of the pool, optional units included.
            waiting_blocks: what the next waiting request requires; 0 = none waits for blocks.

        """
        self.limit = self._num_drafts
        if not self._num_drafts or self._most_blocks() + waiting_blocks <= free_blocks:
            return
        self.limit = draft_limit(self._num_drafts, free_blocks, waiting_blocks, self.growth_blocks)
        for request in self._running.values():
            if len(request.spec_token_ids) > self.limit:
                # vLLM's asynchronous scheduler shares one list among requests.
                request.spec_token_ids = request.spec_token_ids[: self.limit]

    def growth_blocks(self, num_drafts: int) -> int:
        """Return the blocks that running requests take in a step with drafts so long."""
        blocks = 0
        budget = self._max_step_tokens
        for request in self._running.values():
            tokens = request.num_tokens + request.num_output_placeholders
            tokens += min(len(request.spec_token_ids), num_drafts) - request.num_computed_tokens
            tokens = min(tokens, budget)
            budget -= tokens
            end = request.num_computed_tokens + tokens + self._num_lookahead_tokens
            end = min(end, self._max_model_len)
            for tables, block_tokens, num_groups in self._tables:
                held = len(tables[request.request_id])
                blocks += max(0, cdiv(end, block_tokens) - held) * num_groups
        return blocks

    def _most_blocks(self) -> int:
        """Return a bound on `growth_blocks` that costs no walk over the requests."""
        requests = len(self._running)
        tokens = self._max_step_tokens + requests * self._num_lookahead_tokens
        return sum(
            (cdiv(tokens, group.block_tokens) + requests) * group.num_groups
            for group in self._tables
        )
