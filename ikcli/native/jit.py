"""Use Numba as an ahead-of-time compiler: plain functions of integers to object code.

Only the compile worker imports this. `inline` marks device functions (used inside kernels, never called from Python).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba import njit
from numba.core import codegen, compiler, types
from numba.core.registry import cpu_target

from ikcli.native import isa
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


class _CrossCodegen(_Codegen):
    """Makes libraries for another architecture or operating system: code that cannot run in this process."""

    def _init(self, llvm_module: Any) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = isa.current()
        self._triple = _triple(target)
        self._tm_features = target.feature_string
        # As Numba does where the target is at home: kernels may be loaded far from what they call.
        self._tm = llvm.Target.from_triple(self._triple).create_target_machine(
            cpu=target.cpu, features=target.feature_string, opt=3, reloc="static" if target.is_x86 else "default",
            codemodel="jitdefault", jit=True,
        )  # fmt: skip
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = getattr(self, "_triple", module.triple)
        return module

    def _scan_and_fix_unresolved_refs(self, module: Any) -> None:
        pass


def _triple(target: isa.ISA) -> str:
    """Return LLVM's name of the architecture and operating system."""
    systems = {"linux": "unknown-linux-gnu", "darwin": "apple-macosx11.0.0", "win32": "pc-windows-msvc"}
    architecture = "arm64" if target.is_arm64 and isa.system() == "darwin" else target.architecture
    return f"{architecture}-{systems[isa.system()]}"


def _object(module: Any) -> Any:
    return _codegen()._tm.emit_object(module)


def compile_to_object(
    function: Any, args: int | tuple[types.Type, ...], returns: bool, emit: Callable[[Any], Any] = _object
) -> tuple[str, Any]:
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
        return cres.fndesc.llvm_func_name, emit(library._final_module)
    finally:
        context._internal_codegen = usual


def compile_to_assembly(function: Any, args: int | tuple[types.Type, ...], returns: bool) -> str:
    """Compile as `compile_to_object` does; return assembly, for counts of instructions."""
    return compile_to_object(function, args, returns, lambda module: _codegen()._tm.emit_assembly(module))[1]


@functools.cache
def _codegen() -> _Codegen:
    foreign = isa.current().architecture != isa.machine() or isa.system() != sys.platform
    return (_CrossCodegen if foreign else _Codegen)("kernels")
