"""How the compiled functions are compiled, and the one instruction that Numba has no name for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_SOURCES = hashlib.blake2b(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))), digest_size=6
).hexdigest()
"""Names the machine code of this version of the sources."""


def compiled(function: Callable[..., Any]) -> Any:
    """Numba machine code that releases the GIL, kept on disk between runs.

    It may not allocate: it is compiled without reference counts, which took two thirds of the time, since Numba
    counts a reference (atomically) whenever a function takes an array out of a tuple. Functions are inlined into
    each other. Where neither the package's folder nor the user's cache folder can be written, it is compiled anew in
    each process instead.
    """
    # Numba recompiles when a function's own file has changed, but these inline functions of other files.
    function.__qualname__ = f"{function.__qualname__}_{_SOURCES}"
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "forceinline": True,
        "_nrt": False,
        # Sums may be reordered, so that they use vector instructions; nan and infinity keep their meaning.
        "fastmath": {"reassoc", "contract", "nsz"},
    }
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder to keep the machine code in
        return njit(**options)(function)


def _prefetch(typing_context: Any, array: types.Array, index: types.Integer) -> Any:
    """prefetch(array, i): asks for the cache line of row i of a contiguous array, and doesn't wait for it.

    The lines of several lookups then come from memory together instead of one after another.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        row_bytes = cgutils.unpack_tuple(builder, view.strides)[0]
        offset = builder.mul(arguments[1], row_bytes)
        address = builder.inttoptr(
            builder.add(builder.ptrtoint(view.data, offset.type), offset), cgutils.voidptr_t
        )
        flag = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


prefetch: Any = intrinsic(_prefetch)
