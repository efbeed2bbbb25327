"""Compilation with numba, and the few machine instructions that numba does not offer."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

_instruction = cast(Callable[[Any], Any], intrinsic)
_BYTE_POINTER = ir.PointerType(ir.IntType(8))


def compiled(function: Function) -> Function:
    """Compile to machine code that runs without the GIL, kept on disk between processes.

    The copy on disk is dropped when the function's own file changes, but not when a file
    does that it calls into: after an edit here or of ``union.has`` delete ``__pycache__``.
    Take arrays out of a tuple before a loop; inside, each access counts references.
    """
    return cast(Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def _emit(name: str, result: ir.Type, arguments: list[ir.Type], builder: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(result, arguments), name
    )


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTE_POINTER)


@_instruction
def count_bits(typing_context: Any, word: Any) -> Any:
    """Return the number of ones in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word_type = ir.IntType(64)
        return builder.call(_emit("llvm.ctpop.i64", word_type, [word_type], builder), args)

    return types.int64(types.uint64), generate


@_instruction
def lowest_bit(typing_context: Any, word: Any) -> Any:
    """Return the place of the lowest one in a uint64, 64 for none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word_type, flag = ir.IntType(64), ir.IntType(1)
        function = _emit("llvm.cttz.i64", word_type, [word_type, flag], builder)
        return builder.call(function, [args[0], flag(0)])

    return types.int64(types.uint64), generate


@_instruction
def copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes between two addresses that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flag, size = ir.IntType(1), ir.IntType(64)
        function = _emit(
            "llvm.memcpy.p0.p0.i64",
            ir.VoidType(),
            [_BYTE_POINTER, _BYTE_POINTER, size, flag],
            builder,
        )
        target, source = _pointer(builder, args[0]), _pointer(builder, args[1])
        builder.call(function, [target, source, args[2], flag(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_instruction
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; never faults."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        function = _emit(
            "llvm.prefetch.p0", ir.VoidType(), [_BYTE_POINTER, number, number, number], builder
        )
        builder.call(function, [_pointer(builder, args[0]), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate
