"""The one door to the data plane.

Each operation exists as ``reference`` (plain torch: the meaning), ``cpu`` (numba
and torch: the CPU product) and ``triton`` (the GPU product). Callers ask for an
implementation once and never import one of its modules themselves.
"""

from importlib import import_module
from typing import Literal, Protocol, cast

import torch

ImplementationName = Literal["reference", "cpu"]


class DataPlane(Protocol):
    """The operations of one implementation. Integers and bytes agree between all of them."""

    def attend(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        remap: torch.Tensor,
        scale: float,
        value_size: int,
    ) -> torch.Tensor:
        """Sparse MLA over rows by index; knows nothing of tiers.

        Args:
            query: [num_tokens, num_heads, row_size] - absorbed queries, rope part last.
            rows: [num_pages, page_rows, row_size] - any stride between pages.
            remap: [num_tokens, top_k] int32 - ``page * page_rows + offset``, -1 = no row.
            scale: factor of the scores before the softmax.
            value_size: leading values of a row that are the value (the latent part).

        Returns:
            [num_tokens, num_heads, value_size] in the query's dtype. A token whose
            entries are all -1 gets zeros.

        """
        ...


def data_plane(name: ImplementationName) -> DataPlane:
    """Return the implementation called ``name``."""
    return cast(DataPlane, import_module(f"vllm_dhisparse.runtime.{name}"))
