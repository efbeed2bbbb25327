"""The meaning of each data-plane operation, in plain torch. See ``ops`` for the contracts."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_dhisparse.core.clock import FRESH_AGE, MAX_AGE, sweep
from vllm_dhisparse.core.commands import StepCommands, UnitState
from vllm_dhisparse.runtime.apply import apply_commands
from vllm_dhisparse.runtime.host_pool import HostLayer
from vllm_dhisparse.runtime.plan import Phase, Plan, Queries, Resolution, Tier
from vllm_dhisparse.runtime.restore import RestoredSpans, copy_spans
from vllm_dhisparse.runtime.row_format import decode, is_decoding
from vllm_dhisparse.runtime.scratch import Scratch
from vllm_dhisparse.runtime.span import Span
from vllm_dhisparse.runtime.tables import NO_ROW, NO_SLOT, UNIT_ROWS, GroupTables, Tables


def apply(commands: StepCommands, tables: Tables) -> RestoredSpans:
    return apply_commands(commands, tables, _forget_slots, _forget_rows)


def _forget_slots(tables: Tables, first: int, last: int) -> None:
    for slot_of_row, row_of_slot, age, _ in map(tables.group, range(tables.sizes.index_groups)):
        rows = row_of_slot[first:last]
        slot_of_row[rows[rows >= 0].long()] = NO_SLOT
        row_of_slot[first:last] = NO_ROW
        age[first:last] = FRESH_AGE


def _forget_rows(tables: Tables, first: int, last: int) -> None:
    for slot_of_row, row_of_slot, age, _ in map(tables.group, range(tables.sizes.index_groups)):
        slots = slot_of_row[first:last]
        slots = slots[slots >= 0].long()
        row_of_slot[slots] = NO_ROW
        age[slots] = FRESH_AGE
        slot_of_row[first:last] = NO_SLOT


def restore(
    spans: RestoredSpans,
    index_group: int,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
) -> None:
    copy_spans(spans, index_group, slab, unit_blocks, host.pages)


def host_rows(slot_mapping: torch.Tensor, tables: Tables) -> torch.Tensor:
    page_rows = tables.sizes.page_rows
    real = slot_mapping >= 0
    rows = torch.full_like(slot_mapping, NO_ROW)
    page = tables.page_of_block[slot_mapping[real] // page_rows].long()
    assert (page >= 0).all(), "a row is written without a host page"
    rows[real] = page * page_rows + slot_mapping[real] % page_rows
    return rows


def publish(rows: torch.Tensor, host_rows: torch.Tensor, host: HostLayer) -> None:
    real = host_rows >= 0
    target = _as_bytes(host.pages).flatten(0, 1)
    target[host_rows[real]] = _as_bytes(rows)[real]


def enter(
    slot_mapping: torch.Tensor,
    latent_group: int,
    host_rows: torch.Tensor,
    tables: Tables,
    index_group: int,
) -> None:
    real = slot_mapping >= 0
    assert torch.equal(real, host_rows >= 0), "padding of the two slot mappings differs"
    block, row = slot_mapping[real] // UNIT_ROWS, host_rows[real]
    unit = tables.unit_of_block[block].long()
    assert (unit >= 0).all(), "a row is written outside all units"
    assert (tables.unit_state[unit] == UnitState.TAIL).all(), "a row is written outside a tail"
    assert (tables.unit_blocks[unit, latent_group] == block).all(), "block of another group"
    slot = unit * UNIT_ROWS + slot_mapping[real] % UNIT_ROWS

    slot_of_row, row_of_slot, age, _ = tables.group(index_group)
    old_slot = slot_of_row[row]
    old_slot = old_slot[old_slot >= 0].long()
    row_of_slot[old_slot] = NO_ROW
    age[old_slot] = FRESH_AGE
    old_row = row_of_slot[slot]
    slot_of_row[old_row[old_row >= 0].long()] = NO_SLOT
    slot_of_row[row] = slot.int()
    row_of_slot[slot] = row.int()
    age[slot] = FRESH_AGE


class _Union(NamedTuple):
    """Distinct rows of a step, ascending, and what is known about each."""

    rows: torch.Tensor
    slot: torch.Tensor
    tier: torch.Tensor
    kept: torch.Tensor  # selected by a request that is not in prefill


def resolve(
    selected: torch.Tensor,
    queries: Queries,
    tables: Tables,
    index_group: int,
    staging_rows: int,
    scratch: Scratch,
) -> Resolution:
    assert staging_rows >= selected.shape[1], "staging holds less than one query's rows"
    group = tables.group(index_group)
    rows, prefill = _rows_of_selections(selected, queries, tables)
    union = torch.unique(rows[rows >= 0])
    slot = group.slot_of_row[union]
    state = tables.unit_state[slot.clamp(min=0) // UNIT_ROWS]
    tier = torch.where(slot >= 0, state, int(Tier.HOST))
    kept = torch.isin(union, rows[~prefill])
    found = _Union(union, slot, tier, kept)
    _let_in(found, group, tables)

    counted = torch.zeros(len(Phase), len(Tier), dtype=torch.int64)
    for phase in Phase:
        valid = rows[(prefill == bool(phase))[:, None] & (rows >= 0)]
        tiers = tier[torch.searchsorted(union, valid)].long()
        counted[phase] = torch.bincount(tiers, minlength=len(Tier))

    fetched = torch.zeros(len(Phase), dtype=torch.int64)
    pending = tier == Tier.HOST
    plans = []
    for first, last in _passes(rows, union, staging_rows):
        plan = _plan(rows, first, last, found, pending)
        place = torch.searchsorted(union, plan.union.long())
        fetched[Phase.GENERATION] += (plan.fetch & kept[place]).sum()
        fetched[Phase.PREFILL] += (plan.fetch & ~kept[place]).sum()
        pending[place] &= plan.slot < 0  # a later pass finds the others in their slots
        plans.append(plan)
    return Resolution(tuple(plans), counted, fetched)


def _rows_of_selections(
    selected: torch.Tensor, queries: Queries, tables: Tables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Host rows [num_tokens, top_k] int64, and which tokens belong to a prefill."""
    request = queries.request_of_token.long()
    visible = torch.where(request >= 0, queries.visible, 0)
    request = request.clamp(min=0)
    valid = (selected >= 0) & (selected < visible[:, None])
    position = selected.where(valid, torch.zeros_like(selected)).long()
    page_rows = tables.sizes.page_rows
    if not valid.any():  # there may be no block table at all
        return torch.full(selected.shape, NO_ROW), torch.zeros(len(selected), dtype=torch.bool)
    assert position.max() // page_rows < queries.block_table.shape[1], "position without a block"
    block = queries.block_table[request[:, None], position // page_rows].long()
    page = tables.page_of_block[block.where(valid, torch.zeros_like(block))].long()
    assert (page[valid] >= 0).all(), "a row is selected without a host page"
    rows = (page * page_rows + position % page_rows).where(valid, torch.full_like(page, NO_ROW))
    return rows, queries.is_prefill[request]


def _let_in(union: _Union, group: GroupTables, tables: Tables) -> None:
    """Give slots to missing rows of the union, and hit the others, in place."""
    in_use = torch.zeros(tables.sizes.host_rows, dtype=torch.bool)
    in_use[union.rows] = True
    hit = union.slot[union.kept & (union.slot >= 0)].long()
    missing = (union.kept & (union.slot < 0)).nonzero().flatten()

    state = tables.unit_state.repeat_interleave(UNIT_ROWS)
    cache = (state == UnitState.REQUIRED) | (state == UnitState.OPTIONAL)
    empty = cache & (group.row_of_slot < 0)
    replaceable = cache & ~empty & ~in_use[group.row_of_slot.clamp(min=0).long()]
    taken, age, hand = sweep(
        group.age.numpy(), int(group.hand), empty.numpy(), replaceable.numpy(), missing.numel()
    )
    group.age.copy_(torch.from_numpy(age))
    group.hand.fill_(hand)

    slots = torch.from_numpy(taken)
    missing = missing[: slots.numel()]
    old_row = group.row_of_slot[slots]
    group.slot_of_row[old_row[old_row >= 0].long()] = NO_SLOT
    group.row_of_slot[slots] = union.rows[missing].int()
    group.slot_of_row[union.rows[missing]] = slots.int()
    union.slot[missing] = slots.int()
    group.age[hit] = MAX_AGE


def _passes(
    rows: torch.Tensor, union: torch.Tensor, staging_rows: int
) -> Iterator[tuple[int, int]]:
    """Ranges of tokens whose unions fit in staging, each as long as possible."""
    first = 0
    inside = torch.zeros(union.numel(), dtype=torch.bool)
    for token in range(rows.shape[0]):
        own = torch.searchsorted(union, rows[token][rows[token] >= 0])
        before = inside.clone()
        inside[own] = True
        if inside.sum() > staging_rows:
            assert before.any()
            yield first, token
            first = token
            inside.fill_(False)
            inside[own] = True
    yield first, rows.shape[0]


def _plan(rows: torch.Tensor, first: int, last: int, found: _Union, pending: torch.Tensor) -> Plan:
    part = rows[first:last]
    union = torch.unique(part[part >= 0])
    place = torch.searchsorted(found.rows, union)
    remap = torch.searchsorted(union, part).where(part >= 0, torch.full_like(part, -1))
    return Plan(first, last, union.int(), found.slot[place], pending[place], remap.to(torch.int32))


def retrieve(
    plan: Plan,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    staging: torch.Tensor,
) -> torch.Tensor:
    num_rows = plan.union.numel()
    if is_decoding(slab, staging):
        encoded = torch.empty(num_rows, slab.shape[2], dtype=slab.dtype)
        staging[:num_rows] = decode(retrieve(plan, slab, unit_blocks, host, encoded)[0])
        return staging[:num_rows][None]
    target = _as_bytes(staging[:num_rows])
    row = plan.union[plan.fetch].long()
    pages = _as_bytes(host.pages)
    target[plan.fetch] = pages[row // pages.shape[1], row % pages.shape[1]]
    place, fresh = _as_bytes(slab), plan.fetch & (plan.slot >= 0)
    place[_blocks_and_offsets(plan.slot[fresh], unit_blocks)] = target[fresh]
    target[~plan.fetch] = place[_blocks_and_offsets(plan.slot[~plan.fetch], unit_blocks)]
    return staging[:num_rows][None]


def retrieve_in_place(
    plan: Plan,
    span: Span,
    slab: torch.Tensor,
    unit_blocks: torch.Tensor,
    host: HostLayer,
    scratch: Scratch,
) -> torch.Tensor:
    num_rows = plan.union.numel()
    everything = torch.empty(num_rows, slab.shape[2], dtype=slab.dtype)
    retrieve(plan, slab, unit_blocks, host, everything)
    has_slot = plan.slot >= 0
    block, offset = _blocks_and_offsets(plan.slot[has_slot], unit_blocks)
    places = span.staging_first + torch.arange(num_rows, dtype=torch.int32)
    places[has_slot] = (span.slab_first + block * span.block_rows + offset).int()
    rank = torch.arange(num_rows)[~has_slot]
    span.staging[rank // UNIT_ROWS, rank % UNIT_ROWS] = everything[~has_slot]
    index = plan.remap.clamp(min=0).long()
    return torch.where(plan.remap >= 0, places[index], -1) if num_rows else plan.remap


def _blocks_and_offsets(
    slot: torch.Tensor, unit_blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return unit_blocks[slot.long() // UNIT_ROWS].long(), slot.long() % UNIT_ROWS


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    remap: torch.Tensor,
    scale: float,
    value_size: int,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    valid = remap >= 0
    index = remap.clamp(min=0).long()
    page_rows = rows.shape[1]
    picked = rows[index // page_rows, index % page_rows].float()  # [num_tokens, top_k, row_size]
    # The place behind a -1 may hold anything, and 0 * NaN is NaN.
    picked = picked.masked_fill(~valid[..., None], 0.0)
    scores = torch.einsum("thd,tkd->thk", query.float(), picked) * scale
    scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # softmax of no row is NaN
    return torch.einsum("thk,tkd->thd", weights, picked[..., :value_size]).to(query.dtype)
