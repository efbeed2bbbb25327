"""Compilation of the simulator's inner loops."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile to machine code, kept on disk between processes."""
    return cast(Function, numba.njit(cache=True)(function))
