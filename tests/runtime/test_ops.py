import inspect

import pytest
import torch

from vllm_dhisparse.runtime.ops import DataPlane, data_plane, implementation

OPERATIONS = [name for name in vars(DataPlane) if not name.startswith("_")]


def parameters(function):
    return [
        (p.name, p.annotation, p.default) for p in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_implementation_has_every_operation_as_declared(name, operation):
    declared = parameters(getattr(DataPlane, operation))[1:]
    assert parameters(getattr(implementation(name), operation)) == declared


def test_the_device_chooses_the_implementation():
    assert data_plane("cpu") is implementation("cpu")
    assert data_plane(torch.device("cpu")) is implementation("cpu")
