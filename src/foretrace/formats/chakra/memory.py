"""Loads and stores at an address, for compiled code that hands dozens of columns from function to function.

An array argument costs Numba seven words and a reference count in each call; an address is one number. Whoever uses
these keeps the arrays alive, and checks bounds himself. All values are int64, as is the address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic


def _load(bits: int, is_signed: bool) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(bits)
            value = builder.load(builder.inttoptr(arguments[0], word.as_pointer()), align=1)
            if bits == 64:
                return value
            return builder.sext(value, ir.IntType(64)) if is_signed else builder.zext(value, ir.IntType(64))

        return types.int64(types.int64), code

    return intrinsic(load)


def _store(bits: int) -> Any:
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(bits)
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], word)
            builder.store(value, builder.inttoptr(arguments[0], word.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    return intrinsic(store)


get8: Callable[[int], int] = _load(8, False)
get32: Callable[[int], int] = _load(32, True)
get64: Callable[[int], int] = _load(64, True)
put8: Callable[[int, int], None] = _store(8)
put32: Callable[[int, int], None] = _store(32)
put64: Callable[[int, int], None] = _store(64)
