"""What holds the hierarchy together, and the test that fails when it is removed.

| safeguard | named test, in core/test_residency.py |
|---|---|
| dwell | test_dwell_bounds_how_often_bursts_turn_growth |
| head reserve | test_one_step_inside_the_head_reserve_loses_nothing |
| growth reserve | test_growth_inside_the_horizon_loses_nothing |

| safeguard | named test, in runtime/test_resolve.py |
|---|---|
| protection of the union | test_law_2_the_current_union_is_protected_where_victims_are_few |
| clearing of lost slots | test_f29_slots_of_a_lost_unit_are_all_misses_for_the_next_tenant |

Here each is removed and its test must fail. What it costs in a larger run is shown by
integration/test_prefix_hits.py (head reserve) and integration/test_hierarchy.py (the others).
"""

from functools import partial

import pytest

from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.core.optional_units import OptionalUnits
from vllm_dhisparse.runtime import reference

from .core import test_residency as residency
from .runtime import test_resolve as rows


def without_dwell(monkeypatch):
    reconcile = ResidencyController.reconcile
    monkeypatch.setattr(
        ResidencyController,
        "reconcile",
        lambda self, seen, history: reconcile(self, seen, history._replace(dwell_left_steps=0)),
    )


def without_head_reserve(monkeypatch):
    adopt, spare = OptionalUnits.adopt, ResidencyController._spare_blocks
    monkeypatch.setattr(OptionalUnits, "refill_reserve", lambda self, head_reserve_blocks: 0)
    monkeypatch.setattr(OptionalUnits, "adopt", lambda self, units, reserve: adopt(self, units, 0))
    monkeypatch.setattr(
        ResidencyController,
        "_spare_blocks",
        lambda self, seen: spare(self, seen) + self.head_reserve_blocks,
    )


def without_growth_reserve(monkeypatch):
    monkeypatch.setattr(ResidencyController, "_growth_reserve_blocks", lambda self, seen: 0)


def without_protection_of_the_union(monkeypatch):
    sweep = reference.sweep
    monkeypatch.setattr(
        reference,
        "sweep",
        lambda age, hand, empty, replaceable, wanted: sweep(age, hand, empty, ~empty, wanted),
    )


def without_clearing_of_lost_slots(monkeypatch):
    monkeypatch.setattr(reference, "_forget_slots", lambda tables, first, last: None)


make_cache = partial(rows.Cache, "reference")

TABLE = {
    without_dwell: residency.test_dwell_bounds_how_often_bursts_turn_growth,
    without_head_reserve: residency.test_one_step_inside_the_head_reserve_loses_nothing,
    without_growth_reserve: residency.test_growth_inside_the_horizon_loses_nothing,
    without_protection_of_the_union: partial(
        rows.test_law_2_the_current_union_is_protected_where_victims_are_few, make_cache
    ),
    without_clearing_of_lost_slots: partial(
        rows.test_f29_slots_of_a_lost_unit_are_all_misses_for_the_next_tenant, make_cache
    ),
}


@pytest.mark.parametrize("remove", TABLE, ids=lambda remove: remove.__name__)
def test_the_named_test_fails_without_its_safeguard(monkeypatch, remove):
    named_test = TABLE[remove]
    named_test()
    remove(monkeypatch)
    with pytest.raises(AssertionError):
        named_test()
