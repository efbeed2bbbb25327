"""What a worker holds under a hierarchy: host pool, tables, staging, and each layer's part."""

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from vllm.forward_context import get_forward_context

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.commands import StepCommands
from vllm_dhisparse.integration.geometry import Geometry, staging_rows
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec
from vllm_dhisparse.runtime.host_pool import HostPool
from vllm_dhisparse.runtime.ops import DataPlane
from vllm_dhisparse.runtime.plan import Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import Tables, TableSizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_dhisparse.integration.attention import DHiSparseImpl
    from vllm_dhisparse.integration.metadata import DHiSparseMetadata


class LatentLayer(NamedTuple):
    """One layer's place in the hierarchy.

    ``latent_group``: column of ``Tables.unit_blocks``; ``index_group``: its leader's
    number; ``host``: [num_pages, page_rows, row_size]; ``followers``: layers that reuse
    its selection, itself included, 0 for a follower.
    """

    latent_group: int
    index_group: int
    host: torch.Tensor
    followers: int


class WorkerState:
    """Memory of one worker; lives as long as its KV cache.

    Args:
        vllm_config: the engine's configuration.
        config: this package's settings.
        sizes: the model's sizes.
        kv_cache_config: vLLM's plan of this worker's cache.
        num_pages: host pages.
        ops: the data plane.

    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        config: DHiSparseConfig,
        sizes: Geometry,
        kv_cache_config: "KVCacheConfig",
        num_pages: int,
        ops: DataPlane,
    ) -> None:
        self.ops = ops
        self.sizes = sizes
        groups = kv_cache_config.kv_cache_groups
        latent = [g for g in groups if isinstance(g.kv_cache_spec, DHiSparseLatentSpec)]
        address = next(g for g in groups if is_indexer_spec(g.kv_cache_spec))
        assert address.kv_cache_spec.block_size == sizes.plan.indexer_block_tokens
        self._address_layer = address.layer_names[0]
        """Any layer of the group whose blocks own host pages; its metadata has that table."""
        context = vllm_config.compilation_config.static_forward_context
        group_of = {name: i for i, group in enumerate(latent) for name in group.layer_names}
        names = sorted(group_of, key=_layer_number)
        self._layers = [context[name] for name in names]
        impls = {name: context[name].impl for name in names}
        leaders = sum(impl.is_leader for impl in impls.values())

        self.pool = HostPool(
            len(impls),
            num_pages,
            sizes.plan.indexer_block_tokens,
            sizes.row_size,
            vllm_config.model_config.dtype,
            huge_pages=config.huge_pages,
        )
        self.tables = Tables(
            TableSizes(
                num_blocks=kv_cache_config.num_blocks,
                num_units=(kv_cache_config.num_blocks - 1) // len(latent),
                num_pages=num_pages,
                page_rows=sizes.plan.indexer_block_tokens,
                latent_groups=len(latent),
                index_groups=leaders,
            )
        )
        self.staging_rows = staging_rows(vllm_config, config)
        self.staging = torch.empty(
            self.staging_rows, sizes.row_size, dtype=vllm_config.model_config.dtype
        )
        self.scratch = Scratch()
        self.resolution: Resolution | None = None
        """Of the leader that ran last; its followers reuse it."""
        self._place_layers(impls, group_of)

    def _place_layers(self, impls: "dict[str, DHiSparseImpl]", group_of: dict[str, int]) -> None:
        # A leader starts an index group; vLLM builds the layers in order.
        index_group = [
            leaders - 1 for leaders in accumulate(impl.is_leader for impl in impls.values())
        ]
        for number, (name, impl) in enumerate(impls.items()):
            impl.place = LatentLayer(
                latent_group=group_of[name],
                index_group=index_group[number],
                host=self.pool.layer(number),
                followers=index_group.count(index_group[number]) if impl.is_leader else 0,
            )

    def apply(self, commands: StepCommands) -> int:
        """Apply a step's commands; before its forward pass, exactly once and in order.

        Returns:
            Bytes of restored rows.

        """
        num_rows = 0
        for span in self.ops.apply(commands, self.tables):
            for layer in self._layers:
                place = layer.impl.place
                block = self.tables.unit_blocks[span.unit, place.latent_group]
                if block >= 0:  # else the unit was lost again in the same step
                    span.copy(place.index_group, layer.kv_cache[block], place.host)
                    num_rows += int(span.absent[place.index_group].sum())
        return num_rows * self.sizes.row_bytes

    def address_metadata(self) -> "DHiSparseMetadata":
        """The batch as the address group sees it, with the host rows of its new tokens."""
        metadata = cast("dict[str, DHiSparseMetadata]", get_forward_context().attn_metadata)
        address = metadata[self._address_layer]
        if address.host_rows is None:  # the first layer of the step
            address.host_rows = self.ops.host_rows(address.slot_mapping, self.tables)
        return address

    def close(self) -> None:
        """Let go of the host pool."""
        self.pool.close()


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
