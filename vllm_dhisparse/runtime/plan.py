"""What one step asks of the row cache, and the answer."""

from enum import IntEnum
from typing import NamedTuple

import torch

from vllm_dhisparse.core.commands import UnitState


class Tier(IntEnum):
    """Where a selected row was found. ``HOST``: on no device slot; else its unit's state."""

    HOST = UnitState.DEAD
    TAIL = UnitState.TAIL
    REQUIRED = UnitState.REQUIRED
    OPTIONAL = UnitState.OPTIONAL


class Phase(IntEnum):
    """Kinds of requests that the row cache tells apart."""

    GENERATION = 0  # decode and verify
    PREFILL = 1


class Queries(NamedTuple):
    """Who asks in a step.

    ``request_of_token``: [num_tokens] int32 - row of the block table, -1 = padding;
    ``visible``: [num_tokens] int32 - the token may select positions below this;
    ``block_table``: [num_requests, width] int32 - blocks of the address group;
    ``is_prefill``: [num_requests] bool - the request's rows are read from the cache where
    they are in it, but neither enter nor age it, so that a prompt cannot flush it;
    ``most_rows``: that the step can read, where the host knows a bound.
    """

    request_of_token: torch.Tensor
    visible: torch.Tensor
    block_table: torch.Tensor
    is_prefill: torch.Tensor
    most_rows: int | None = None


class Plan(NamedTuple):
    """How queries ``first .. last`` of the step read their rows, the same in every layer.

    Tensors are views of the scratch that ``resolve`` was given and last until its next use.
    Where the size of the union is not known on the host, n is what it may be, and the rows
    end with ``NO_ROW``; nothing else is said about those places.

    ``union``: [n] int32 - distinct host rows, ascending;
    ``slot``: [n] int32 - device place of each row, ``NO_SLOT`` = staging only;
    ``fetch``: [n] bool - the row comes from its host row, and into its slot if it has one;
    ``remap``: [last - first, top_k] int32 - index into ``union``, -1 = no row.
    """

    first: int
    last: int
    union: torch.Tensor
    slot: torch.Tensor
    fetch: torch.Tensor
    remap: torch.Tensor


def fetch_plan(host_rows: torch.Tensor, device: torch.device) -> Plan:
    """Return a plan of one query that fetches these rows into staging only.

    Args:
        host_rows: [n] int - distinct, ascending.
        device: of the plan.

    """
    count = len(host_rows)
    return Plan(
        0,
        1,
        host_rows.to(torch.int32).to(device),
        torch.full((count,), -1, dtype=torch.int32, device=device),
        torch.ones(count, dtype=torch.bool, device=device),
        torch.arange(count, dtype=torch.int32, device=device)[None],
    )


class Resolution(NamedTuple):
    """Plans of a step, which cover its queries in order, and its row counters.

    ``selected``: [phases, tiers] int64 - selections, duplicates included, by the tier in
    which the row was found before anything was fetched;
    ``fetched``: [phases] int64 - rows copied from the host; a row that both kinds of
    requests selected counts as generation.
    """

    plans: tuple[Plan, ...]
    selected: torch.Tensor
    fetched: torch.Tensor


class SparseQuery(NamedTuple):
    """What one call of sparse MLA is asked, in the order of ``ops.DataPlane.attend``.

    ``query``: [num_tokens, num_heads, row_size]; ``rows``: [pages, page_rows, row_size];
    ``remap``: [num_tokens, top_k] int32 - of rows, -1 = none; ``scale``: of the scores;
    ``value_size``: leading values of a row that are the value.
    """

    query: torch.Tensor
    rows: torch.Tensor
    remap: torch.Tensor
    scale: float
    value_size: int
