"""Addresses of the rows that a step writes, and their entries in the map."""

import torch

from vllm_dhisparse.core.clock import FRESH_AGE
from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.kernels import shapes
from vllm_dhisparse.kernels.mapping import enter_rows, find_host_rows
from vllm_dhisparse.runtime.tables import UNIT_ROWS, Tables


def host_rows(slot_mapping: torch.Tensor, tables: Tables) -> torch.Tensor:
    rows = torch.empty_like(slot_mapping)
    num_tokens = slot_mapping.numel()
    if num_tokens:
        find_host_rows[(-(-num_tokens // shapes.TOKENS),)](
            slot_mapping,
            tables.page_of_block,
            rows,
            tables.errors,
            num_tokens,
            tables.sizes.page_rows,
            tables.sizes.num_blocks,
            BLOCK=shapes.TOKENS,
        )
    return rows


def enter(
    slot_mapping: torch.Tensor,
    latent_group: int,
    host_rows: torch.Tensor,
    tables: Tables,
    index_group: int,
) -> None:
    slot_of_row, row_of_slot, age, _ = tables.group(index_group)
    unit_blocks = tables.unit_blocks[:, latent_group]
    enter_rows[(1,)](
        slot_mapping,
        host_rows,
        tables.unit_of_block,
        tables.unit_state,
        unit_blocks,
        slot_of_row,
        row_of_slot,
        age,
        tables.errors,
        slot_mapping.numel(),
        unit_blocks.stride(0),
        UNIT_ROWS=UNIT_ROWS,
        TAIL=int(UnitState.TAIL),
        FRESH_AGE=FRESH_AGE,
        BLOCK=shapes.TOKENS,
    )
