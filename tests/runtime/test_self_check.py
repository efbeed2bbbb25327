from types import SimpleNamespace

import pytest
import torch
from planes import IMPLEMENTATIONS, plane

from vllm_dhisparse.runtime import self_check as module
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.self_check import self_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_proves_itself(name, dtype):
    self_check(plane(name), dtype=dtype)


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "triton"), (False, "cpu")])
def test_the_command_checks_what_the_device_runs(monkeypatch, capsys, has_gpu, expected):
    checked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(module, "self_check", lambda *given: checked.append(given))
    module.main()
    ((ops, device, dtype),) = checked
    assert ops is implementation(expected)
    assert device == ("cuda" if has_gpu else "cpu")
    assert dtype == (torch.bfloat16 if has_gpu else torch.float32)
    assert f"data plane {expected}" in capsys.readouterr().out


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
