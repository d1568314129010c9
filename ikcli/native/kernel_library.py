"""Compiled kernels as addresses and callables, loaded without Numba."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ikcli.errors import IkError
from ikcli.native.compile_pool import compile_kernels
from ikcli.native.kernel_cache import ADVICE, KernelKey, cache_dir, find_entry, read_entry


class KernelLibrary:
    """Addresses of compiled kernels; keeps the JIT engines that own the code alive."""

    def __init__(self) -> None:
        self._engines: list[Any] = []
        self._addresses: dict[KernelKey, int] = {}

    def require(self, keys: Iterable[KernelKey], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels, compiling those that are not in the cache; `progress(done, total)` per compiled one."""
        wanted = [k for k in dict.fromkeys(keys) if k not in self._addresses]
        entries = {k: find_entry(k) for k in wanted}
        missing = [k for k in wanted if entries[k] is None]
        if missing:
            compile_kernels(missing, progress)
        for key in wanted:
            path = cache_dir() / key.file_name
            entry = entries[key] or read_entry(path)
            if entry is None:
                raise IkError(f"{path}: the kernel just compiled cannot be read; {ADVICE}")
            self._addresses[key] = self._load(path, *entry)

    def __getitem__(self, key: KernelKey) -> int:
        return self._addresses[key]

    def _load(self, path: Path, symbol: str, code: bytes) -> int:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address: int = engine.get_function_address(symbol)
        if not address:
            raise IkError(f"{path}: no function {symbol} inside; delete the folder {path.parent}")
        self._engines.append(engine)
        return address


@functools.cache
def shared_library() -> KernelLibrary:
    """Return the library of this process, so that successive sessions load every kernel once."""
    return KernelLibrary()


def native_function(address: int, n_args: int, *, keep_gil: bool = False) -> Callable[..., int]:
    """Return a compiled function of int64 arguments as a Python callable that returns its status.

    It releases the GIL, and another thread may delay taking it back; `keep_gil`: for calls of a few microseconds.
    """
    make = ctypes.PYFUNCTYPE if keep_gil else ctypes.CFUNCTYPE
    prototype = make(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * n_args)
    function = prototype(address)
    ret, exc = ctypes.c_int64(), ctypes.c_int64()
    ret_p, exc_p = ctypes.addressof(ret), ctypes.addressof(exc)

    def call(*args: int, _keep: tuple[Any, ...] = (ret, exc)) -> int:
        if function(ret_p, exc_p, *args):
            raise IkError("internal error: a kernel reported failure")
        return ret.value

    return call
