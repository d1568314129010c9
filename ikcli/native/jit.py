"""Numba as an ahead-of-time compiler: plain functions of integers to object code.

Only the compile worker imports this. `inline` marks device functions (used inside kernels, never called from Python).

Numba makes every function fit to be called: optimized with all that it calls, and as machine code in memory, again for
each function above it. Here nothing is ever called, so functions are only linked, and kernels alone are optimized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit
from numba.core import compiler, types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import cpu_target

_OPTIONS = {"boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_made: dict[Hashable, Any] = {}


class _Library(JITCodeLibrary):
    """The intermediate code of a function and of all that it calls."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def object_code(self) -> bytes:
        """Optimized machine code."""
        self._optimize_final_module()
        self._final_module.verify()
        code: bytes = self._codegen._tm.emit_object(self._final_module)
        return code


class _Codegen(JITCPUCodegen):
    """Code that is not executed here."""

    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        pass


@functools.cache
def _codegen() -> _Codegen:
    return _Codegen("kernels")


@contextmanager
def _never_called() -> Iterator[None]:
    """What Numba compiles meanwhile can only be called by what it compiles."""
    context = cpu_target.target_context
    usual, context._internal_codegen = context._internal_codegen, _codegen()
    try:
        yield
    finally:
        context._internal_codegen = usual


def inline(function: Callable[..., Any]) -> Any:
    """A device function: compiled into every kernel that calls it. Equal functions are the same one."""
    key = _identity(function)
    if key is None or key not in _made:
        made = njit(function, nogil=True, error_model="numpy", **_OPTIONS)
        if key is None:
            return made
        _made[key] = made
    return _made[key]


def _identity(function: Callable[..., Any]) -> Hashable | None:
    """What a function is made of; None where that cannot be compared."""
    try:
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
        described = [(type(x), repr(x), x) for x in captured]  # equal numbers of two types are not the same
        key = (function.__module__, function.__code__, function.__defaults__, *described)
        hash(key)
    except (ValueError, TypeError):  # not bound yet, or without a hash
        return None
    return key


def merge(function: Callable[..., Any]) -> Any:
    """A device function whose statements become part of every caller, so that LLVM sees them once.

    For large bodies called from one or two places.
    """
    return njit(function, nogil=True, error_model="numpy", inline="always", **_OPTIONS)


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
    with _never_called():
        cres = compiler.compile_extra(
            cpu_target.typing_context, cpu_target.target_context, function, arg_types, return_type, flags, {}
        )
    return cres.fndesc.llvm_func_name, cres.library.object_code()
