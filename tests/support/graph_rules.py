"""What a CUDA graph cannot hold, found with tensors of the host.

A graph repeats kernels with the shapes and addresses of its capture. So nothing may wait for a
value of a tensor, bring host data along, or have a shape that follows from values.
"""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode, resolve_name

WAITS = (
    "item tolist numpy cpu __bool__ __int__ __float__ __index__ __contains__ __array__ nonzero "
    "argwhere masked_select unique unique_consecutive equal allclose is_nonzero pin_memory"
)
BRINGS = "tensor as_tensor from_numpy frombuffer"


class GraphRules(TorchFunctionMode):
    """Raises on what no graph can hold, and notes what was called and launched.

    ``calls``: name and shapes of everything in order; the same batch must give the same.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.paused = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return function(*args, **kwargs)
        name = (resolve_name(function) or function.__name__).rpartition(".")[2]
        assert name not in WAITS.split(), f"{name} waits for the device"
        assert name not in BRINGS.split(), f"{name} brings host data"
        if name == "repeat_interleave":
            assert "output_size" in kwargs, "the shape follows from values"
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in index:
                assert not isinstance(part, list), "a list is brought to the device"
                assert getattr(part, "dtype", None) != torch.bool, "the shape follows from values"
        result = function(*args, **kwargs)
        tensors = [part for part in (*args, result) if isinstance(part, torch.Tensor)]
        self.calls.append((name, [tuple(part.shape) for part in tensors]))
        return result

    @contextmanager
    def launches(self, monkeypatch):
        """Note launches of interpreted kernels, and let them compute as they like."""
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def noted(executor, *args, **kwargs):
            self.calls.append((executor.fn.__name__, executor.grid))
            self.paused = True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self.paused = False

        with monkeypatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", noted)
            yield
