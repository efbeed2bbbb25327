"""What a worker holds under a hierarchy: host pool, tables, staging."""

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from vllm.forward_context import get_forward_context

from vllm_dhisparse.core.commands import StepCommands
from vllm_dhisparse.core.ledger import max_units
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec
from vllm_dhisparse.integration.row_counters import RowCounters
from vllm_dhisparse.runtime.host_pool import HostLayer, HostPool
from vllm_dhisparse.runtime.ops import DataPlane
from vllm_dhisparse.runtime.plan import Queries, Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.tables import Tables, TableSizes
from vllm_dhisparse.runtime.usage import UsageProbe

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_dhisparse.integration.metadata import DHiSparseMetadata


class LayerPlace(NamedTuple):
    """Where a layer's rows are.

    ``kv_cache``: [num_blocks, block_size, row_size]; ``latent_group``: column of
    ``Tables.unit_blocks``; ``index_group``: number of its leader; ``host``: home of its rows.
    """

    kv_cache: torch.Tensor
    latent_group: int
    index_group: int
    host: HostLayer


class StepInputs(NamedTuple):
    """What all layers read in a step.

    ``metadata``: the batch as the address group sees it; ``host_rows``: [num_tokens] int64,
    where the new rows live; ``queries``: who asks.
    """

    metadata: "DHiSparseMetadata"
    host_rows: torch.Tensor
    queries: Queries


class WorkerState:
    """Memory of one worker; lives as long as its KV cache.

    Args:
        sizes: the model's sizes.
        kv_cache_config: vLLM's plan of this worker's cache.
        layers: vLLM's attention layers with latent rows, by name, in model order.
        num_pages: host pages.
        ops: the data plane.
        counters: where rows and bytes are counted.
        rank: of this worker among the tensor-parallel ones.

    """

    def __init__(
        self,
        sizes: Geometry,
        kv_cache_config: "KVCacheConfig",
        layers: dict[str, Any],
        num_pages: int,
        ops: DataPlane,
        counters: RowCounters,
        rank: int = 0,
    ) -> None:
        self.ops = ops
        self.sizes = sizes
        self.counters = counters
        groups = kv_cache_config.kv_cache_groups
        latent = [g for g in groups if isinstance(g.kv_cache_spec, DHiSparseLatentSpec)]
        address = next(g for g in groups if is_indexer_spec(g.kv_cache_spec))
        assert address.kv_cache_spec.block_size == sizes.plan.indexer_block_tokens
        self._address_layer = address.layer_names[0]
        """Any layer of the group whose blocks own host pages; its metadata has that table."""
        group_of = {name: i for i, group in enumerate(latent) for name in group.layer_names}
        self.pool = HostPool(
            len(layers),
            num_pages,
            sizes.plan.indexer_block_tokens,
            sizes.row_size,
            sizes.dtype,
            huge_pages=sizes.config.huge_pages,
            numa_node=sizes.numa_node(rank),
        )
        self.places: list[LayerPlace] = []
        index_group = -1
        for number, (name, layer) in enumerate(layers.items()):
            index_group += layer.impl.is_leader  # vLLM builds a leader before its followers
            host = self.pool.host_layer(number)
            self.places.append(LayerPlace(layer.kv_cache, group_of[name], index_group, host))
        self.tables = Tables(
            TableSizes(
                num_blocks=kv_cache_config.num_blocks,
                num_units=max_units(kv_cache_config.num_blocks - 1, len(latent)),
                num_pages=num_pages,
                page_rows=sizes.plan.indexer_block_tokens,
                latent_groups=len(latent),
                index_groups=index_group + 1,
            )
        )
        self.staging = torch.empty(sizes.staging_rows, sizes.row_size, dtype=sizes.dtype)
        self.scratch = Scratch()
        self.resolution: Resolution | None = None
        """Of the leader that ran last; its followers reuse it."""
        self._step_inputs: StepInputs | None = None
        self._sampled_group = -1
        """Index group whose use is looked at in this step, each in turn; -1 = none."""

    def apply(self, commands: StepCommands) -> None:
        """Apply a step's commands; before its forward pass, exactly once and in order."""
        self._step_inputs = None
        turn, rest = divmod(commands.step + 1, self.sizes.config.stats_interval_steps)
        self._sampled_group = -1 if rest else turn % self.tables.sizes.index_groups
        spans = self.ops.apply(commands, self.tables)
        if not len(spans.units):
            return
        for place in self.places:
            unit_blocks = self.tables.unit_blocks[:, place.latent_group]
            self.ops.restore(spans, place.index_group, place.kv_cache, unit_blocks, place.host)
        is_live = self.tables.unit_blocks[spans.units, 0] >= 0  # not lost again in the same step
        rows_of_group = spans.absent[is_live].sum(dim=(0, 2)).tolist()
        restored_rows = sum(rows_of_group[place.index_group] for place in self.places)
        self.counters.add_restored(restored_rows * self.sizes.row_bytes)

    def step_inputs(self) -> StepInputs:
        """Return what the step's layers share; the first layer computes it."""
        if self._step_inputs is None:
            context = cast("dict[str, DHiSparseMetadata]", get_forward_context().attn_metadata)
            metadata = context[self._address_layer]
            host_rows = self.ops.host_rows(metadata.slot_mapping, self.tables)
            self._step_inputs = StepInputs(metadata, host_rows, metadata.queries())
        return self._step_inputs

    def resolve(self, selected: torch.Tensor, index_group: int) -> None:
        """Plan a leader's selection, for itself and its followers."""
        inputs = self.step_inputs()
        is_sampled = index_group == self._sampled_group
        probe = UsageProbe(self.tables, index_group) if is_sampled else None
        self.resolution = self.ops.resolve(
            selected,
            inputs.queries,
            self.tables,
            index_group,
            self.sizes.staging_rows,
            self.scratch,
        )
        if probe is not None:
            self.counters.add_usage(probe.take(selected, inputs.queries, self.resolution))
        num_layers = sum(place.index_group == index_group for place in self.places)
        layer_bytes = num_layers * self.sizes.row_bytes
        self.counters.add_resolution(self.resolution, inputs.metadata, layer_bytes)

    def close(self) -> None:
        """Unpin the host pool; its memory goes with the layers that still view it."""
        self.pool.close()
