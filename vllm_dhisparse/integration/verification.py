"""Expected fetch time in vLLM's adaptive verification, which is profiled on resident rows."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_dhisparse.core.drafts import with_fetch_time
from vllm_dhisparse.integration.draft_price import Verified


class PricedVerification(AdaptiveVerificationManager):
    """vLLM's choice of how many drafts to verify, by costs with fetch time in them.

    It is made before the worker gets the step's message, so by the price of the step before.
    """

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Return the tokens of the step, and note what is verified of it."""
        worker = get_kv_transfer_group().worker
        this: Any = self  # mypy sees no types of vLLM's attributes
        stock = this.cost_tables
        draft_ms, verify_ms = stock
        this.cost_tables = draft_ms, with_fetch_time(verify_ms, worker.fetch_ms_per_draft)
        try:
            num_tokens: int = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        finally:
            this.cost_tables = stock
        num_drafts = sum(map(len, draft_tokens.values()))
        cut = sum(num_tokens_per_req.values()) - num_tokens
        worker.verified = Verified(len(draft_tokens), num_drafts - cut)
        return num_tokens


def choose_verification(is_priced: bool) -> None:
    """Say what vLLM builds for the engine to come of this process."""
    kind = PricedVerification if is_priced else AdaptiveVerificationManager
    adaptive_verification.AdaptiveVerificationManager = kind
