from types import SimpleNamespace

import pytest

from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.self_check import self_check


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_every_implementation_proves_itself(name):
    self_check(implementation(name))


def altered(**operations):
    return SimpleNamespace(**vars(implementation("reference")) | operations)


def test_a_row_that_is_not_published_is_missed():
    with pytest.raises(RuntimeError, match="rows read from the host"):
        self_check(altered(publish=lambda *_: None))


def test_a_fetched_row_that_does_not_enter_its_slot_is_missed():
    reference = implementation("reference")

    def retrieve(plan, slab, *rest):
        return reference.retrieve(plan, slab.clone(), *rest)

    with pytest.raises(RuntimeError, match="rows read from the cache"):
        self_check(altered(retrieve=retrieve))


def test_wrong_attention_is_seen():
    reference = implementation("reference")

    def attend(query, rows, remap, scale, value_size):
        return reference.attend(query, rows, remap, 2 * scale, value_size)

    with pytest.raises(RuntimeError, match="attention over rows read from the host"):
        self_check(altered(attend=attend))
