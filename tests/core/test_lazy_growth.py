"""Growth by misses against having all memory at once: why no working set is estimated."""

from typing import NamedTuple

import numpy as np
import pytest
from workloads import recorded_streams, synthetic_streams

from vllm_dhisparse.core.clock import MAX_AGE, sweep
from vllm_dhisparse.core.controller import History, Pressure, ResidencyController
from vllm_dhisparse.simulator.workloads import workload

UNIT_ROWS = 64


class Result(NamedTuple):
    misses: int
    capacity_rows: int
    filled_rows: int


def run(load, start_units, controller):
    """One CLOCK for all requests, which grows as told; without a controller it is complete."""
    all_units = load.num_rows // UNIT_ROWS
    units = start_units if controller else all_units
    row_of_slot = np.full(all_units * UNIT_ROWS, -1)
    slot_of_row = np.full(load.num_rows, -1)
    age = np.zeros(row_of_slot.size, dtype=np.uint8)
    hand = fetched = total = 0
    history = History()
    for rows in load.rows:
        if controller:
            seen = Pressure(
                total_blocks=all_units,
                free_blocks=all_units - start_units,
                blocks_per_unit=1,
                tail_units=0,
                required_units=start_units,
                optional_units=units - start_units,
                lost_units=0,
                waiting_blocks=0,
                growth_blocks=0,
                fetched_rows=fetched,
                restorable_units=0,
            )
            targets, history = controller.reconcile(seen, history)
            units += targets.adopt_units
        capacity = units * UNIT_ROWS
        union = rows[rows >= 0]
        slots = slot_of_row[union]
        missing = union[slots < 0]
        in_use = np.zeros(capacity, dtype=bool)
        in_use[slots[slots >= 0]] = True
        empty = row_of_slot[:capacity] < 0
        taken, age[:capacity], hand = sweep(
            age[:capacity], hand, empty, ~empty & ~in_use, missing.size
        )
        old = row_of_slot[taken]
        slot_of_row[old[old >= 0]] = -1
        row_of_slot[taken] = missing[: taken.size]
        slot_of_row[missing[: taken.size]] = taken
        age[slots[slots >= 0]] = MAX_AGE
        fetched = missing.size
        total += fetched
    return Result(total, units * UNIT_ROWS, int((row_of_slot >= 0).sum()))


@pytest.mark.parametrize(
    ("name", "streams", "k"),
    [
        ("recorded", recorded_streams, 160),
        ("synthetic", lambda: synthetic_streams(seed=1, steps=700, k=128), 128),
    ],
)
def test_growth_by_misses_misses_nothing_more_and_leaves_the_rest_alone(name, streams, k):
    load = workload(streams())
    requests = load.rows.shape[1]
    lazy = run(load, requests * k // UNIT_ROWS, ResidencyController(head_reserve_blocks=0))
    complete = run(load, 0, None)
    selected = (load.rows >= 0).sum()
    print(
        f"\n{name}: {lazy.misses / selected:.3%} missed with {lazy.capacity_rows} rows at the end,"
        f" {complete.misses / selected:.3%} with {complete.capacity_rows} rows from the start,"
        f" of which {complete.filled_rows} were ever used"
    )
    assert lazy.misses <= 1.001 * complete.misses
    assert lazy.capacity_rows <= 1.1 * complete.filled_rows
