"""What a worker holds under a hierarchy: host pool, tables, staging."""

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from vllm.forward_context import get_forward_context

from vllm_dhisparse.core.commands import StepCommands
from vllm_dhisparse.core.units import max_units
from vllm_dhisparse.integration.geometry import Geometry
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec, is_indexer_spec
from vllm_dhisparse.integration.row_counters import RowCounters
from vllm_dhisparse.runtime.host_pool import HostLayer, HostPool, Pinner
from vllm_dhisparse.runtime.ops import DataPlane, InPlaceDataPlane
from vllm_dhisparse.runtime.plan import Plan, Queries, Resolution
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.span import Span
from vllm_dhisparse.runtime.tables import Tables, TableSizes
from vllm_dhisparse.runtime.usage import UsageProbe

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_dhisparse.integration.layers import RowAttention


class LayerPlace(NamedTuple):
    """Where a layer's rows are.

    ``kv_cache``: [num_blocks, block_size, row_size]; ``latent_group``: column of
    ``Tables.unit_blocks``; ``index_group``: number of its leader; ``host``: home of its rows;
    ``span``: reaches rows on the device where they are, None = they are copied to staging.
    """

    kv_cache: torch.Tensor
    latent_group: int
    index_group: int
    host: HostLayer
    span: Span | None


class StepInputs(NamedTuple):
    """What all layers read in a step.

    ``metadata``: the batch as the address group sees it; ``host_rows``: [num_tokens] int64,
    where the new rows live; ``queries``: who asks.
    """

    metadata: Any
    host_rows: torch.Tensor
    queries: Queries


class Device(NamedTuple):
    """How a worker's device works.

    ``device``: of tables and staging; ``pinner``: makes host memory readable to it, None =
    it is; ``staging``: [staging_rows, row values], in the form that ``attention`` reads;
    ``address``: from the metadata of a layer of the address group to the batch; ``span``:
    from a layer's KV cache to what reaches its rows in place, None = they are copied.
    """

    device: torch.device
    pinner: Pinner | None
    staging: torch.Tensor
    scratch: Scratch
    attention: "RowAttention"
    address: Callable[[Any], Any]
    span: Callable[[torch.Tensor], Span | None]


class WorkerState:
    """Memory of one worker; lives as long as its KV cache.

    Args:
        sizes: the model's sizes.
        kv_cache_config: vLLM's plan of this worker's cache.
        layers: vLLM's attention layers with latent rows, by name, in model order.
        num_pages: host pages.
        ops: the data plane.
        counters: where rows and bytes are counted.
        device: of the worker.
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
        device: Device,
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
            pinner=device.pinner,
            device=device.device,
            huge_pages=sizes.config.huge_pages,
            numa_node=sizes.numa_node(rank),
        )
        index_groups = index_groups_of(layers)
        self.places: list[LayerPlace] = []
        for number, (name, layer) in enumerate(layers.items()):
            host = self.pool.host_layer(number)
            self.places.append(
                LayerPlace(
                    layer.kv_cache,
                    group_of[name],
                    index_groups[number],
                    host,
                    device.span(layer.kv_cache),
                )
            )
        self.tables = Tables(
            TableSizes(
                num_blocks=kv_cache_config.num_blocks,
                num_units=max_units(kv_cache_config.num_blocks - 1, len(latent)),
                num_pages=num_pages,
                page_rows=sizes.plan.indexer_block_tokens,
                latent_groups=len(latent),
                index_groups=index_groups[-1] + 1,
            ),
            device.device,
        )
        self.staging = device.staging
        self.scratch = device.scratch
        self.attention = device.attention
        self._address = device.address
        self.resolution: Resolution | None = None
        """Of the leader that ran last; its followers reuse it."""
        self._step_inputs: StepInputs | None = None
        self._sampled_group = -1
        """Index group whose use is looked at in this step, each in turn; -1 = none."""

    def apply(self, commands: StepCommands) -> None:
        """Apply a step's commands; before its forward pass, exactly once and in order.

        A step that is missed or comes twice is an error of the next call. The forward pass
        cannot look for it: vLLM's dummy passes, which come without commands, look like others.
        """
        turn, rest = divmod(commands.step + 1, self.sizes.config.stats_interval_steps)
        is_sampled = self.counters.samples_usage and not rest
        self._sampled_group = turn % self.tables.sizes.index_groups if is_sampled else -1
        spans = self.ops.apply(commands, self.tables)
        if not len(spans.units):
            return
        for place in self.places:
            unit_blocks = self.tables.unit_blocks[:, place.latent_group]
            self.ops.restore(spans, place.index_group, place.kv_cache, unit_blocks, place.host)
        is_live = self.tables.unit_blocks[spans.units, 0] >= 0  # not lost again in the same step
        self.counters.add_restored((spans.absent & is_live[:, None, None]).sum(dim=(0, 2)))

    def step_inputs(self) -> StepInputs:
        """Return what the step's layers share; the first layer computes it."""
        metadata = get_forward_context().attn_metadata[self._address_layer]
        inputs = self._step_inputs
        # vLLM builds new metadata for every step, also for those without commands.
        if inputs is None or inputs.metadata is not self._address(metadata):
            batch = self._address(metadata)
            host_rows = self.ops.host_rows(batch.slot_mapping, self.tables)
            inputs = self._step_inputs = StepInputs(batch, host_rows, batch.queries())
        return inputs

    def resolve(self, selected: torch.Tensor, index_group: int) -> None:
        """Plan a leader's selection, for itself and its followers."""
        inputs = self.step_inputs()
        is_sampled = index_group == self._sampled_group
        probe = UsageProbe(self.tables, index_group) if is_sampled else None
        self.counters.before_resolution(index_group)
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
        self.counters.add_resolution(self.resolution, inputs.metadata, index_group)

    def retrieve(self, plan: Plan, place: LayerPlace) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring a layer's rows to where attention reads them; return rows and index for it."""
        unit_blocks = self.tables.unit_blocks[:, place.latent_group]
        if place.span is None:
            rows = self.ops.retrieve(plan, place.kv_cache, unit_blocks, place.host, self.staging)
            return rows, plan.remap
        ops = cast(InPlaceDataPlane, self.ops)
        index = ops.retrieve_in_place(
            plan, place.span, place.kv_cache, unit_blocks, place.host, self.scratch
        )
        return place.span.rows, index

    def close(self) -> None:
        """Unpin the host pool; its memory goes with the layers that still view it."""
        self.pool.close()


def index_groups_of(layers: dict[str, Any]) -> list[int]:
    """Return the index group of each layer, in order: vLLM builds a leader before its followers."""
    return [number - 1 for number in accumulate(layer.impl.is_leader for layer in layers.values())]
