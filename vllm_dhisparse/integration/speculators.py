"""vLLM's DFlash, DFlash2 and DSpark speculators with the draft KV that this package gives them.

Proposals and acceptance are vLLM's own. What changes is where draft KV lies, and with it
which rows of a long prompt are written at all.
"""

import sys
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu import spec_decode

from vllm_dhisparse.integration.connector_registration import names_our_connector
from vllm_dhisparse.integration.draft_layers import draft_backend
from vllm_dhisparse.integration.draft_ring import DraftRingSpec
from vllm_dhisparse.integration.draft_window import impose_window
from vllm_dhisparse.integration.geometry import Geometry, geometry, has_draft_rings
from vllm_dhisparse.integration.names import DRAFTS_WITH_CACHE
from vllm_dhisparse.integration.v2_runner import complete_sampler

logger = init_logger("vllm.dhisparse")


class DraftSpeculator:
    """Mixed into a speculator of vLLM's DFlash family, whose methods it extends."""

    sizes: Geometry
    """Of the engine."""
    has_rings = False

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the drafter and give its attention layers their KV specs."""
        this: Any = self
        stock: Any = super()
        model: torch.nn.Module = stock.load_draft_model(target_model, target_attn_layer_names)
        rows = this.num_query_per_req if self.has_rings else None
        layers = this.vllm_config.compilation_config.static_forward_context
        for name, layer in layers.items():
            if name not in target_attn_layer_names and hasattr(layer, "attn_backend"):
                layer.attn_backend = draft_backend(layer.attn_backend, self.sizes.plan, rows)
        return model


class RingSpeculator(DraftSpeculator):
    """Also keeps the KV of windowed draft layers in rings."""

    has_rings = True

    def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Note which of the drafter's KV groups are rings."""
        this: Any = self
        stock: Any = super()
        stock.set_attn(model_state, kv_cache_config, *args, **kwargs)
        groups = kv_cache_config.kv_cache_groups
        specs = [groups[i].kv_cache_spec for i in this.draft_kv_cache_group_ids]
        self._ring_rows = {
            place: spec.earlier_rows
            for place, spec in enumerate(specs)
            if isinstance(spec, DraftRingSpec)
        }
        for spec in specs:
            if isinstance(spec, DraftRingSpec):
                logger.info(
                    "DHISPARSE: draft KV in rings of %d rows per request (window %d, %d rows "
                    "of a draft, blocks of %d tokens)",
                    spec.ring_rows,
                    spec.sliding_window,
                    spec.query_rows,
                    spec.block_size,
                )

    def prepare_context_anchor(self, input_batch: Any, num_rejected: torch.Tensor) -> None:
        """Note the batch whose context is about to be written."""
        stock: Any = super()
        stock.prepare_context_anchor(input_batch, num_rejected)
        self._query_start_loc = input_batch.query_start_loc[: input_batch.num_reqs + 1]
        self._num_rejected = num_rejected[: input_batch.num_reqs]

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        """Write the context's rows, in rings only those that a draft can still see."""
        this: Any = self
        stock: Any = super()
        if not dummy_run and self._ring_rows:
            hidden_age = rows_behind(
                this.context_positions, self._query_start_loc, self._num_rejected
            )
            for place, earlier_rows in self._ring_rows.items():
                slots = this._context_slot_mappings[place, : len(hidden_age)]
                slots.masked_fill_(hidden_age >= earlier_rows, PAD_SLOT_ID)
        stock._precompute_context_kv(start, end, dummy_run)


def rows_behind(
    positions: torch.Tensor, query_start_loc: torch.Tensor, num_rejected: torch.Tensor
) -> torch.Tensor:
    """Return by how many tokens each row lies before the last accepted one of its request.

    Of a chunk that is longer than a ring, two rows have one place. Those that no draft will
    see must not be written, since the order of writes is open.

    Args:
        positions: [>= num_tokens] int64.
        query_start_loc: [num_reqs + 1] int32.
        num_rejected: [num_reqs] int32.

    Returns:
        [num_tokens] int64; of rejected rows, any number.

    """
    starts = query_start_loc.long()
    lengths = starts.diff()
    request = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths)
    last = positions[starts[1:] - 1 - num_rejected.long()]
    return last[request] - positions[: len(request)]


def placed_speculator(speculator: Any, sizes: Geometry, has_rings: bool) -> Any:
    """Return a speculator of vLLM's DFlash family, just built, with draft KV in its place."""
    stock, ours_too = type(speculator), RingSpeculator if has_rings else DraftSpeculator
    kind: Any = type(f"DHiSparse{stock.__name__}", (ours_too, stock), {"sizes": sizes})
    ours = object.__new__(kind)
    ours.__dict__.update(speculator.__dict__)
    return ours


def register_speculators() -> None:
    """Put this package's speculators in the place of vLLM's, for its own engines only.

    vLLM's model runner takes the function by name when it is imported, which may have been.
    """
    stock = spec_decode.init_speculator
    if hasattr(stock, "for_dhisparse"):
        return

    def init_speculator(vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Any:
        """Build the speculator of an engine."""
        # It imports much of vLLM's worker, which other processes do without.
        from vllm_dhisparse.integration.verification import choose_verification

        speculation = vllm_config.speculative_config
        ours = names_our_connector(vllm_config.kv_transfer_config)
        choose_verification(is_priced=ours)
        if not ours or speculation.method not in DRAFTS_WITH_CACHE:
            return stock(vllm_config, device, req_states)
        complete_sampler()
        sizes = geometry(vllm_config)
        if window := sizes.config.draft_window_tokens:
            logger.warning(
                "DHISPARSE: the drafter, which attends to all tokens, is given a window of %d "
                "tokens. It may propose other drafts; what is accepted stays exact.",
                window,
            )
            impose_window(speculation.draft_model_config.hf_config, window)
        speculator = stock(vllm_config, device, req_states)
        return placed_speculator(speculator, sizes, has_draft_rings(vllm_config))

    ours: Any = init_speculator
    ours.for_dhisparse = True
    spec_decode.init_speculator = init_speculator
    runner: Any = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = init_speculator
