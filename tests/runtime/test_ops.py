import inspect

import pytest

from vllm_dhisparse.runtime.ops import DataPlane, data_plane

OPERATIONS = [name for name in vars(DataPlane) if not name.startswith("_")]


def parameters(function):
    return [
        (p.name, p.annotation, p.default) for p in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_implementation_has_every_operation_as_declared(name, operation):
    declared = parameters(getattr(DataPlane, operation))[1:]
    assert parameters(getattr(data_plane(name), operation)) == declared
