"""Device memory that all layers of a worker use in turn.

The layers make it while the model is built, so that vLLM sees it when it measures what is
left for the KV cache.
"""

from weakref import WeakValueDictionary

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_dhisparse.integration.cuda.flash_mla import FlashMlaAttention, unavailable_reason
from vllm_dhisparse.integration.geometry import Geometry, latent_row, num_index_groups
from vllm_dhisparse.integration.layers import PlaneAttention, RowAttention
from vllm_dhisparse.integration.names import FP8_ROWS, HOST_PAGES
from vllm_dhisparse.runtime.ops import data_plane
from vllm_dhisparse.runtime.row_format import ENCODED_BYTES
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.span import Span, span, staging_bytes

logger = init_logger("vllm.dhisparse")


class Workspace:
    """Queries, staging and attention of one worker.

    Attributes:
        attention: FlashMLA where vLLM has it for this device, else the data plane's.
        query: [max tokens, heads, row values] - absorbed queries; heads that pad them to
            what ``attention`` wants stay zero.
        staging: [staging_rows, row values] - in the form that ``attention`` reads; zero at
            first, since a masked index still loads a row.
        scratch: memory of the plans.
        copies_because: why hits are copied to staging; None = attention reads them in place.

    Args:
        vllm_config: the engine's.
        sizes: its geometry.
        num_heads: attention heads of this rank.
        device: of the worker.

    """

    def __init__(
        self, vllm_config: VllmConfig, sizes: Geometry, num_heads: int, device: torch.device
    ) -> None:
        self.owner = vllm_config
        self.scratch = Scratch(device)
        hf_config = vllm_config.model_config.hf_text_config
        values, dtype = latent_row(
            "auto",
            vllm_config.model_config.dtype,
            hf_config.kv_lora_rank,
            hf_config.qk_rope_head_dim,
        )
        quantised = vllm_config.cache_config.cache_dtype == FP8_ROWS
        capability = current_platform.get_device_capability()
        assert capability is not None
        self.attention, heads = _choose_attention(num_heads, device, self.scratch, capability)
        staged = isinstance(self.attention, FlashMlaAttention) or not quantised
        row_size, row_dtype = (sizes.row_size, sizes.dtype) if staged else (values, dtype)
        block_bytes = sizes.plan.page_bytes
        self.copies_because = _cannot_reach(sizes.row_bytes, block_bytes, capability)
        if not staged:
            self.copies_because = "rows are decoded for Triton's attention"
        resident = sizes.config.residency == "resident"
        if resident and not staged:
            raise ValueError(
                "residency resident with --kv-cache-dtype fp8_ds_mla needs FlashMLA, which this "
                "vLLM or device lacks; use bfloat16"
            )
        rows = 0 if resident else sizes.staging_rows
        pages = 0 if resident else _host_pages(vllm_config)
        map_rows = pages * sizes.plan.indexer_block_tokens * num_index_groups(hf_config)
        self._reserve = torch.empty(map_rows, dtype=torch.int32, device=device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.query = torch.zeros(tokens, heads, values, dtype=dtype, device=device)
        row_bytes = row_size * row_dtype.itemsize
        num_bytes = staging_bytes(rows, row_bytes, block_bytes) if rows else 0
        self._memory = allocate_staging(num_bytes, device)
        self.staging = self._memory[: rows * row_bytes].view(row_dtype).view(rows, row_size)

    def span(self, kv_cache: torch.Tensor) -> Span | None:
        """Return what reaches staging and the rows of a layer's KV cache; None = copy them.

        Once for each layer, when the cache stands. Row 0 of vLLM's null block, which a masked
        index may load, is made a number.
        """
        if self.copies_because is None:
            try:
                found = span(kv_cache, self._memory, len(self.staging))
                kv_cache[0].zero_()
                return found
            except ValueError as error:
                self.copies_because = str(error)
        logger.info_once(
            "DHISPARSE copies rows that are on the device to staging: %s", self.copies_because
        )
        return None

    def release_reserve(self) -> None:
        """Make room for the maps of the row cache, which vLLM has now measured with the rest."""
        self._reserve = self._reserve[:0].clone()


def _host_pages(vllm_config: VllmConfig) -> int:
    transfer = vllm_config.kv_transfer_config
    return 0 if transfer is None else int(transfer.kv_connector_extra_config.get(HOST_PAGES, 0))


_workspaces: "WeakValueDictionary[int, Workspace]" = WeakValueDictionary()


def shared_workspace(
    vllm_config: VllmConfig, sizes: Geometry, num_heads: int, device: torch.device
) -> Workspace:
    """Return the workspace of the engine that is being built; its layers keep it alive."""
    workspace = _workspaces.get(id(vllm_config))
    if workspace is None:
        workspace = Workspace(vllm_config, sizes, num_heads, device)
        _workspaces[id(vllm_config)] = workspace
    return workspace


def allocate_staging(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeros: [num_bytes] uint8."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _cannot_reach(row_bytes: int, block_bytes: int, capability: DeviceCapability) -> str | None:
    """Return why attention cannot read such blocks where they are, or None.

    FlashMLA reads bfloat16 as rows of one tensor. Encoded rows it reads as pages of 64, at any
    distance on Hopper; on Blackwell its copy engine wants pages that are whole rows apart.
    """
    if block_bytes % row_bytes == 0 or (row_bytes == ENCODED_BYTES and capability.major == 9):
        return None
    return (
        f"blocks of {block_bytes} bytes are not whole rows of {row_bytes}, which attention wants "
        f"on compute capability {capability.as_version_str()}"
    )


def _choose_attention(
    num_heads: int, device: torch.device, scratch: Scratch, capability: DeviceCapability
) -> tuple[RowAttention, int]:
    reason = unavailable_reason(capability)
    if reason is None:
        flash_mla = FlashMlaAttention()
        return flash_mla, flash_mla.query_heads(num_heads)
    logger.warning("DHISPARSE attends with its own Triton kernels: %s", reason)
    return PlaneAttention(data_plane(device), scratch), num_heads
