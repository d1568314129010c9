"""Compiled kernels on disk, loaded without Numba.

A kernel is named by a `KernelKey`: module under `kernels/`, factory function, arguments. Numba compiles the factory's
result in worker processes (`compile_worker.py`); what is kept is the object file, which LLVM's JIT linker loads in
about half a millisecond. So only the first run ever pays for Numba: its import (0.5 s, 100 MB) and the compilation.

The folder is named by the target CPU and the versions of Python, Numba and llvmlite, the file by a digest of the
kernel's module and of every module of ours that it imports: an edited kernel or helper can never be served stale.
LLVM ends the process when it is given a damaged object file, so every file starts with a line of magic, SHA-256 of the
code, and symbol; a file that does not fit its line is compiled again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikcli.errors import IkError
from ikcli.native import isa

_MAGIC = "ik-kernel-1"  # of the file format
_ADVICE = "set IK_CACHE_DIR to a folder with free space that you may write to"
_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_IMPORT = re.compile(r"^from (ikcli[\w.]*) import ([\w, ]*)|^import (ikcli[\w.]*)", re.M)


@dataclass(frozen=True, slots=True)
class KernelKey:
    """`<module>: <factory>(*args)`; a module without dots is one of backends/cpu/kernels; args are ints and strings."""

    module: str
    factory: str
    args: tuple[int | str, ...] = ()

    @property
    def full_module(self) -> str:
        return self.module if "." in self.module else f"ikcli.backends.cpu.kernels.{self.module}"

    @property
    def text(self) -> str:
        return f"{self.module}.{self.factory}({','.join(str(a) for a in self.args)})"

    @property
    def file_name(self) -> str:
        readable = "_".join([self.factory, *(str(a) for a in self.args)])
        digest = hashlib.sha256(f"{_MAGIC} {self.text} {source_digest(self.full_module)}".encode()).hexdigest()[:16]
        return f"{readable[:80]}-{digest}.kernel"


@functools.cache
def source_digest(module: str) -> str:
    """Digest of a module's source and of everything of ours that it imports, directly or not."""
    todo, seen = [module, "ikcli.native.jit"], set[str]()
    h = hashlib.sha256()
    while todo:
        name = todo.pop()
        path = _source_file(name)
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        text = path.read_text(encoding="utf-8")
        for found in sorted(_IMPORT.findall(text)):
            base = found[0] or found[2]
            todo += [base, *(f"{base}.{part.strip()}" for part in found[1].split(","))]
        h.update(f"{name}\0{text}\0".encode())
    return h.hexdigest()


def _source_file(module: str) -> Path:
    """Where a module's source is, or would be; a module of another package is one that was imported from a file."""
    if module.split(".")[0] == "ikcli":
        return _PACKAGE_DIR.joinpath(*module.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.find_spec(module)
    return Path(spec.origin if spec is not None and spec.origin is not None else "")


def cache_root() -> Path:
    """`IK_CACHE_DIR`, else the user's cache folder."""
    if custom := os.environ.get("IK_CACHE_DIR"):
        return Path(custom) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ik" / "kernels"


@functools.cache
def cache_dir() -> Path:
    """Folder for this target and these versions of the compiler."""
    target = isa.current()
    versions = [_version(p) for p in ("numba", "llvmlite")]
    text = "\0".join([*versions, sys.version, target.cpu, ",".join(sorted(target.features))])
    return cache_root() / f"{target.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _version(package: str) -> str:
    """Version of an installed package from its `_version.py` (a few ms of every run less than by its metadata)."""
    spec = importlib.util.find_spec(package)
    with suppress(OSError):
        text = Path(spec.origin).with_name("_version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
        found = re.search(r"""^ *"version": "([\w.+]+)"|^version_version = '([\w.+]+)'""", text, re.M)
        if found:
            return found[1] or found[2]
    from importlib import metadata

    return metadata.version(package)


def is_cached(key: KernelKey) -> bool:
    """Whether the kernel has been compiled already."""
    return _read_entry(cache_dir() / key.file_name) is not None


def pack_entry(symbol: str, code: bytes) -> bytes:
    """Contents of a cache file."""
    return f"{_MAGIC} {hashlib.sha256(code).hexdigest()} {symbol}\n".encode() + code


def _read_entry(path: Path) -> tuple[str, bytes] | None:
    """(symbol, object code) of a cache file; None if there is none or it is damaged."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    magic, _, rest = head.partition(b" ")
    digest, _, symbol = rest.partition(b" ")
    if magic != _MAGIC.encode() or digest != hashlib.sha256(code).hexdigest().encode():
        return None
    return symbol.decode(errors="replace"), code


class KernelLibrary:
    """Addresses of compiled kernels; keeps the JIT engines that own the code alive."""

    def __init__(self) -> None:
        self._engines: list[Any] = []
        self._addresses: dict[KernelKey, int] = {}

    def require(self, keys: Iterable[KernelKey], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels, compiling those that are not in the cache; `progress(done, total)` per compiled one."""
        wanted = [k for k in dict.fromkeys(keys) if k not in self._addresses]
        entries = {k: _read_entry(cache_dir() / k.file_name) for k in wanted}
        missing = [k for k in wanted if entries[k] is None]
        if missing:
            compile_kernels(missing, progress)
        for key in wanted:
            path = cache_dir() / key.file_name
            entry = entries[key] or _read_entry(path)
            if entry is None:
                raise IkError(f"{path}: the kernel just compiled cannot be read; {_ADVICE}")
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
    """The library of this process: sessions that come and go load every kernel once."""
    return KernelLibrary()


def compile_kernels(keys: Sequence[KernelKey], progress: Callable[[int, int], None] | None = None) -> None:
    """Compile kernels into the cache, in as many processes as there are CPUs for this one."""
    directory = cache_dir()
    _make_writable(directory)
    n_workers = max(1, min(len(keys), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
    target = isa.current()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(_PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]))
    if target.feature_string or target is not isa.host():
        env |= {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.feature_string}
    command = [sys.executable, "-P", "-m", "ikcli.native.compile_worker", str(directory)]
    workers = []
    for i in range(n_workers):
        lines = "".join(f"{k.module} {k.factory} {' '.join(repr(a) for a in k.args)}\n" for k in keys[i::n_workers])
        p = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=env
        )
        assert p.stdin is not None
        p.stdin.write(lines.encode())
        p.stdin.close()
        workers.append(p)
    _wait(workers, len(keys), progress)


def _make_writable(directory: Path) -> None:
    """Create the cache folder; IkError if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise IkError(f"{directory}: the kernel cache cannot be written ({e.strerror or e}); {_ADVICE}") from None


def _wait(workers: list[subprocess.Popen[bytes]], total: int, progress: Callable[[int, int], None] | None) -> None:
    import selectors

    done = 0
    with selectors.DefaultSelector() as selector:
        for p in workers:
            selector.register(p.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        while selector.get_map():
            for event, _ in selector.select():
                line = event.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    selector.unregister(event.fileobj)
                    continue
                done += 1
                if progress:
                    progress(done, total)
    for p in workers:
        assert p.stdout is not None and p.stderr is not None
        errors = p.stderr.read().decode(errors="replace")
        p.stdout.close()
        p.stderr.close()
        if p.wait() != 0:
            raise IkError(f"compiling kernels failed: {errors.strip()[-2000:]}")


def native_function(address: int, n_args: int, *, keep_gil: bool = False) -> Callable[..., int]:
    """A compiled function of int64 arguments as a Python callable; returns its status.

    It releases the GIL, which takes as long to get back as another thread likes; `keep_gil`: for a few microseconds.
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
