"""Numba as an ahead-of-time compiler: plain functions of integers to object code.

Only the compile worker imports this. `inline` marks device functions (used inside kernels, never called from Python).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import compiler, types
from numba.core.registry import cpu_target


def inline(function: Callable[..., Any]) -> Any:
    """A device function: compiled into every kernel that calls it."""
    return njit(function, nogil=True, error_model="numpy", boundscheck=False, no_cpython_wrapper=True)


def merge(function: Callable[..., Any]) -> Any:
    """A device function whose statements become part of every caller, so that LLVM sees them once.

    For large bodies called from one or two places: an `inline` function is optimized once by itself and again in each
    function above it. That costs half of the compile time and makes faster kernels: functions that were only linked,
    and optimized as a whole, made a token of a small model take 4 % longer.
    """
    return njit(function, nogil=True, error_model="numpy", boundscheck=False, inline="always")


def compile_to_object(function: Any, args: int | tuple[types.Type, ...], returns: bool) -> tuple[str, bytes]:
    """(symbol, ELF/Mach-O/COFF object) of `function(int64, ...) -> None | int64`, self-contained but for libm/libc.

    `args`: how many int64, or types that are passed as such.
    """
    flags = compiler.Flags()
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.nrt = False
    flags.error_model = "numpy"
    flags.enable_looplift = False
    return_type = types.int64 if returns else types.void
    function = getattr(function, "py_func", function)
    arg_types = (types.int64,) * args if isinstance(args, int) else args
    cres = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, function, arg_types, return_type, flags, {}
    )
    return cres.fndesc.llvm_func_name, cres.library._get_compiled_object()
