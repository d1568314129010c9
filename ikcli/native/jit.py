"""Use Numba as an ahead-of-time compiler: plain functions of integers to object code.

Only the compile worker imports this. `inline` marks device functions (used inside kernels, never called from Python).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import codegen, compiler, types
from numba.core.registry import cpu_target

from ikcli.native.lean_numba import KernelPipeline, lean


def inline(function: Callable[..., Any]) -> Any:
    """Mark a device function, compiled into every kernel that calls it."""
    return njit(function, nogil=True, error_model="numpy", boundscheck=False, no_cpython_wrapper=True,
                no_cfunc_wrapper=True, pipeline_class=KernelPipeline)  # fmt: skip


def merge(function: Callable[..., Any]) -> Any:
    """Mark a device function whose statements become part of every caller.

    This suits large bodies called from one or two places. Numba inserts them before type inference. LLVM then sees one
    function and makes somewhat smaller kernels.
    """
    return njit(function, nogil=True, error_model="numpy", boundscheck=False, inline="always")


class _Library(codegen.JITCodeLibrary):
    """Code of a device function, which kernels link, or of a kernel, which is emitted; nothing runs in this process.

    Numba would link to each device function all functions that it calls, optimize it and generate its machine code, and
    do this again in each caller: more than half of the time that a kernel takes. Here a kernel links each function once
    and is optimized as a whole.
    """

    is_kernel = False

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def finalize(self) -> None:
        if self.is_kernel:
            self._linking_libraries = self._called()
            super().finalize()
        else:
            self._finalized = True

    def _called(self) -> list[_Library]:
        """Return the libraries of all functions that it calls, directly or not, every caller before its callees.

        LLVM drops functions that nothing has named yet; hence the order.
        """
        seen: set[_Library] = set()
        callees_first: list[_Library] = []

        def visit(library: _Library) -> None:
            seen.add(library)
            for called in reversed(library._linking_libraries):
                if called not in seen:
                    visit(called)
            callees_first.append(library)

        visit(self)
        return callees_first[-2::-1]

    def _verify_declare_only_symbols(self) -> None:
        missing = [f.name for f in self._final_module.functions if f.is_declaration and f.name.startswith("_ZN")]
        if missing:
            raise AssertionError(f"functions that were not linked: {missing}")

    def _finalize_specific(self) -> None:
        pass


class _Codegen(codegen.JITCPUCodegen):
    """Makes such libraries, and gives them to no engine."""

    _library_class = _Library

    def _add_module(self, module: Any) -> None:
        pass

    def set_env(self, env_name: str, env: Any) -> None:
        pass


def compile_to_object(function: Any, args: int | tuple[types.Type, ...], returns: bool) -> tuple[str, bytes]:
    """Compile `function(int64, ...) -> None | int64`; return (symbol, ELF/Mach-O/COFF object).

    The object depends on nothing but libm and libc. `args`: the number of int64, or types that are passed as such.
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
    context = cpu_target.target_context  # of all of Numba in this process, so it gets its own one back
    usual, context._internal_codegen = context._internal_codegen, _codegen()
    try:
        library = _codegen().create_library(function.__name__)
        library.is_kernel = True
        with lean(cpu_target.typing_context):
            cres = compiler.compile_extra(
                cpu_target.typing_context, context, function, arg_types, return_type, flags, {}, library=library,
                pipeline_class=KernelPipeline
            )  # fmt: skip
        return cres.fndesc.llvm_func_name, _codegen()._tm.emit_object(library._final_module)
    finally:
        context._internal_codegen = usual


@functools.cache
def _codegen() -> _Codegen:
    return _Codegen("kernels")
