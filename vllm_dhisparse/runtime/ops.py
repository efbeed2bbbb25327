"""The one door to the data plane.

Each operation exists as ``reference`` (plain torch: the meaning), ``cpu`` (numba
and torch: the CPU product) and ``triton`` (the GPU product). Callers ask for the one of
their device once and never import one of its modules themselves.

A step calls ``apply`` and in every layer ``restore``, then ``host_rows``, then in every
layer ``publish``, in leader layers ``enter`` and ``resolve``, and for each plan
``retrieve`` and ``attend``. Tables change only in ``apply``, ``enter`` and ``resolve``;
impossible input is an AssertionError and leaves them undefined.
"""

from importlib import import_module
from typing import Literal, Protocol, cast

import torch

from vllm_dhisparse.core.commands import StepCommands
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.plan import Plan, Queries, Resolution
from vllm_dhisparse.runtime.restore import RestoredSpans
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.span import Span
from vllm_dhisparse.runtime.tables import Tables

ImplementationName = Literal["reference", "cpu", "triton"]


class DataPlane(Protocol):
    """The operations of one implementation. Integers and bytes agree between all of them."""

    def apply(self, commands: StepCommands, tables: Tables) -> RestoredSpans:
        """Apply the commands of the next step, in order.

        A page that is bound or dropped loses its rows' map entries, a lost unit its slots'.
        The step must follow the one applied before. The rows of the spans returned must be
        copied in every layer, see ``restore``, before the step reads any.
        """
        ...

    def restore(
        self,
        spans: RestoredSpans,
        index_group: int,
        slab: torch.Tensor,
        unit_blocks: torch.Tensor,
        host: HostLayer,
    ) -> None:
        """Copy the rows of restored spans in one layer; units that are dead again get none.

        Args:
            spans: from ``apply`` of this step.
            index_group: of the layer.
            slab: KV cache of the layer, see ``retrieve``.
            unit_blocks: [num_units] int32 - blocks of the layer's latent group.
            host: home of the layer's rows.

        """
        ...

    def host_rows(self, slot_mapping: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Return the host row of every token that the step writes.

        Args:
            slot_mapping: [num_tokens] int64 of the address group - ``block * page_rows +
                offset``, negative = padding.
            tables: the worker's tables; every block must have a page.

        Returns:
            [num_tokens] int64, ``NO_ROW`` for padding.

        """
        ...

    def publish(self, rows: torch.Tensor, host_rows: torch.Tensor, host: HostLayer) -> None:
        """Copy the rows that a layer wrote in this step to their host rows.

        Args:
            rows: [num_tokens, row_size].
            host_rows: [num_tokens] int64 - ``NO_ROW`` = padding.
            host: home of the layer's rows.

        """
        ...

    def enter(
        self,
        slot_mapping: torch.Tensor,
        latent_group: int,
        host_rows: torch.Tensor,
        tables: Tables,
        index_group: int,
    ) -> None:
        """Enter the rows written in this step in the map of an index group.

        The row's old slot and the slot's old row are forgotten. Rows must lie in tails.

        Args:
            slot_mapping: [num_tokens] int64 of the leader's latent group - ``block *
                UNIT_ROWS + offset``, negative = padding.
            latent_group: column of ``unit_blocks`` that holds those blocks.
            host_rows: [num_tokens] int64 - ``NO_ROW`` = padding.
            tables: the worker's tables.
            index_group: group whose map changes.

        """
        ...

    def resolve(
        self,
        selected: torch.Tensor,
        queries: Queries,
        tables: Tables,
        index_group: int,
        staging_rows: int,
        scratch: Scratch,
    ) -> Resolution:
        """Plan how the step's selections are read, and let fetched rows into the cache.

        Rows of the step are never victims. Missing rows take slots in ascending order as
        long as there are any, as ``core.clock.sweep`` chooses them; then rows found in the
        cache are hit. The step is one plan unless its union is larger than staging; then
        every plan takes as many of the following queries as fit, and a row without a slot is
        fetched by every plan that reads it.

        Args:
            selected: [num_tokens, top_k] int32 - positions in the token's request. Negative
                values, and positions that the token does not see, select nothing.
            queries: who asks; all tokens of a request lie together.
            tables: the worker's tables.
            index_group: group that the selections belong to.
            staging_rows: rows that one plan may hold, at least ``top_k``.
            scratch: memory of the plans.

        """
        ...

    def retrieve(
        self,
        plan: Plan,
        slab: torch.Tensor,
        unit_blocks: torch.Tensor,
        host: HostLayer,
        staging: torch.Tensor,
    ) -> torch.Tensor:
        """Bring the rows of a plan to where ``attend`` can read them; fill fresh slots.

        Args:
            plan: from ``resolve`` of this step.
            slab: [num_blocks, block_rows, row_size] - KV cache of a layer, any stride
                between blocks, at least ``UNIT_ROWS`` rows in each.
            unit_blocks: [num_units] int32 - blocks of the layer's latent group.
            host: home of the layer's rows.
            staging: [staging_rows, row_size], of the slab's dtype. Or, but not on the CPU,
                [staging_rows, 576] bfloat16 for a slab of ``fp8_ds_mla`` rows, [..., 656]
                uint8: rows are decoded on the way, see ``row_format``.

        Returns:
            [1, n, row_size] - row ``i`` is that of ``plan.union[i]``; a view of ``staging``.

        """
        ...

    def attend(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        remap: torch.Tensor,
        scale: float,
        value_size: int,
        scratch: Scratch | None = None,
    ) -> torch.Tensor:
        """Sparse MLA over rows by index; knows nothing of tiers.

        Args:
            query: [num_tokens, num_heads, row_size] - absorbed queries, rope part last.
            rows: [num_pages, page_rows, row_size] - any stride between pages.
            remap: [num_tokens, top_k] int32 - ``page * page_rows + offset``, -1 = no row.
            scale: factor of the scores before the softmax.
            value_size: leading values of a row that are the value (the latent part).
            scratch: memory for the rows of one query; without it the call allocates its own.

        Returns:
            [num_tokens, num_heads, value_size] in the query's dtype. A token whose
            entries are all -1 gets zeros.

        """
        ...


class InPlaceDataPlane(DataPlane, Protocol):
    """A data plane that leaves hits where they are, so that only misses move."""

    def retrieve_in_place(
        self,
        plan: Plan,
        span: Span,
        slab: torch.Tensor,
        unit_blocks: torch.Tensor,
        host: HostLayer,
        scratch: Scratch,
    ) -> torch.Tensor:
        """Fetch what is missing into its slot, or to staging when it has none.

        Args:
            plan: see ``retrieve``, as all that follow.
            span: of the layer, with staging for the plan.
            slab: where hits lie.
            unit_blocks: of the layer's latent group.
            host: home of the layer's rows.
            scratch: memory of the result.

        Returns:
            [num_tokens, top_k] int32 - ``plan.remap`` as rows of ``span.rows``, -1 = no row.

        """
        ...


def data_plane(device: torch.device | str) -> DataPlane:
    """Return the product's implementation for a device."""
    return implementation("cpu" if torch.device(device).type == "cpu" else "triton")


def implementation(name: ImplementationName) -> DataPlane:
    """Return the implementation called ``name``; for tests, which compare them."""
    return cast(DataPlane, import_module(f"vllm_dhisparse.runtime.{name}"))
