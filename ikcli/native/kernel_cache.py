"""Keep compiled kernels on disk: find a kernel's file, and tell whether it exists.

A kernel is named by a `KernelKey`: module under `kernels/`, factory function, arguments. Worker processes compile the
factory's result with Numba (`compile_pool.py`, `compile_worker.py`). The object file is kept; LLVM's JIT linker loads
it in about half a millisecond (`kernel_library.py`). So only the first run ever pays for Numba: its import (0.5 s, 100
MB) and the compilation.

The folder is named by the target CPU and the versions of Python, Numba and llvmlite, the file by a digest of the
kernel's module and of every module of ours that it imports: an edited kernel or helper can never be served stale. That
digest is quick to compute, but an edit of one helper gives all kernels new names. So every file has a second name, made
of the definitions that the kernel reaches (`code_digest.py`); before a kernel is compiled it is looked up under that
name. LLVM ends the process when it is given a damaged object file, so every file starts with a line of magic, SHA-256
of the code, and symbol; a file that does not match its line is compiled again.

What the cache lacks may be among the kernels that an installed package brings (`kernel_pack.py`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ikcli.native import isa, kernel_pack

_MAGIC = "ik-kernel-1"  # of the file format
ADVICE = "set IK_CACHE_DIR to a folder with free space that you may write to"
PACKAGE_DIR = Path(__file__).resolve().parents[1]
_REFERENCE = re.compile(r"([\w.]+):(\w+)")  # ikcli.references
_IMPORT = re.compile(r"^from (ikcli[\w.]*) import ([\w, ]*)|^import (ikcli[\w.]*)", re.M)


@dataclass(frozen=True, slots=True)
class KernelKey:
    """`<module>: <factory>(*args)`; a module without dots is one of backends/cpu/kernels; args are ints and strings.

    Where an argument names something as `module:attribute`, that module belongs to the kernel's sources as well.
    """

    module: str
    factory: str
    args: tuple[int | str, ...] = ()

    @property
    def full_module(self) -> str:
        return self.module if "." in self.module else f"ikcli.backends.cpu.kernels.{self.module}"

    @property
    def text(self) -> str:
        """Return the key for people: an argument that describes something shows only its name."""
        return f"{self.module}.{self.factory}({','.join(_short(a) for a in self.args)})"

    @property
    def line(self) -> str:
        """Return the whole key without a line break."""
        return " ".join([self.module, self.factory, *(repr(a) for a in self.args)])

    @classmethod
    def of_line(cls, line: str) -> KernelKey:
        """Return the key from which `line` was made; arguments contain no spaces."""
        module, factory, *args = line.split()
        return cls(module, factory, tuple(ast.literal_eval(a) for a in args))

    @property
    def file_name(self) -> str:
        readable = "_".join([self.factory, *(_short(a) for a in self.args)])
        sources = " ".join(source_digest(module) for module, _ in self._definitions)
        digest = hashlib.sha256(f"{_MAGIC} {self._whole} {sources}".encode()).hexdigest()[:16]
        return f"{readable[:80]}-{digest}.kernel"

    @property
    def code_name(self) -> str:
        """Return the second name, which takes much longer to compute."""
        from ikcli.native.code_digest import code_digest

        definitions = (*self._definitions, ("ikcli.native.jit", "*"))
        parts = [_MAGIC, self._whole, *(code_digest(module, name, _source_file) for module, name in definitions)]
        return f"code-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}.kernel"

    @property
    def _whole(self) -> str:
        return f"{self.module}.{self.factory}({','.join(str(a) for a in self.args)})"

    @property
    def _definitions(self) -> list[tuple[str, str]]:
        """Return (module, name) of the factory and of the definitions that arguments name."""
        named = [found for a in self.args for found in _REFERENCE.findall(str(a))]
        return [(self.full_module, self.factory), *named]


def _short(argument: int | str) -> str:
    return _REFERENCE.sub(r"\2", str(argument)).partition(",")[0]


@functools.cache
def source_digest(module: str) -> str:
    """Return a digest of a module's source and of every module of ours that it imports, directly or not."""
    todo, seen = [module, "ikcli.native.jit"], set[str]()
    h = hashlib.sha256()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        text, imported = _source(name)
        if text is not None:
            todo += imported
            h.update(f"{name}\0{text}\0".encode())
    return h.hexdigest()


@functools.cache
def _source(module: str) -> tuple[str | None, tuple[str, ...]]:
    """Return a module's source (None without one), and the modules of ours that it imports."""
    path = _source_file(module)
    if not path.is_file():
        return None, ()
    text = path.read_text(encoding="utf-8")
    imported: list[str] = []
    for found in sorted(_IMPORT.findall(text)):
        base = found[0] or found[2]
        imported += [base, *(f"{base}.{part.strip()}" for part in found[1].split(","))]
    return text, tuple(imported)


def _source_file(module: str) -> Path:
    """Return the path of a module's source, whether it exists or not; modules of other packages must be imported."""
    if module.split(".")[0] == "ikcli":
        return PACKAGE_DIR.joinpath(*module.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.find_spec(module)
    return Path(spec.origin if spec is not None and spec.origin is not None else "")


def cache_root() -> Path:
    """Return `IK_CACHE_DIR`, else the user's cache folder."""
    if custom := os.environ.get("IK_CACHE_DIR"):
        return Path(custom) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ik" / "kernels"


def cache_dir() -> Path:
    """Return the folder for this target and these versions of the compiler."""
    return cache_root() / _folder_name()


@functools.cache
def _folder_name() -> str:
    target = isa.current()
    versions = [_version(p) for p in ("numba", "llvmlite")]
    text = "\0".join([*versions, sys.version, target.cpu, ",".join(sorted(target.features))])
    if isa.system() != sys.platform:  # for which objects have another format
        text += f"\0{isa.system()}"
    return f"{target.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _version(package: str) -> str:
    """Return a package's version from its `_version.py`, which saves a few ms per run compared with its metadata."""
    spec = importlib.util.find_spec(package)
    with suppress(OSError):
        text = Path(spec.origin).with_name("_version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
        found = re.search(r"""^ *"version": "([\w.+]+)"|^version_version = '([\w.+]+)'""", text, re.M)
        if found:
            return found[1] or found[2]
    from importlib import metadata

    return metadata.version(package)


def is_cached(key: KernelKey) -> bool:
    """Return whether the kernel has been compiled already."""
    return find_entry(key) is not None


def has_code_names(directory: Path) -> bool:
    """Return whether any kernel there has a second name; otherwise none need be computed."""
    return any(directory.glob("code-*.kernel"))


def has_kernels() -> bool:
    """Return whether there are any kernels for this target, in the cache or in the package."""
    directory = cache_dir()
    return _pack() is not None or (directory.is_dir() and any(directory.glob("*.kernel")))


def find_entry(key: KernelKey) -> tuple[str, bytes] | None:
    """Return (symbol, object code) of a kernel from the cache or the package; None if it has to be compiled."""
    name = key.file_name
    found = read_entry(cache_dir() / name)
    if found is None and (pack := _pack()) is not None and (contents := pack.find(name)) is not None:
        return _unpack_entry(contents)
    return found


@functools.cache
def _pack() -> kernel_pack.KernelPack | None:
    """Return the kernels in the package for this target."""
    level = isa.packed_level(isa.current())
    if level is None:
        return None
    path = kernel_pack.FOLDER / kernel_pack.pack_name(level)
    return kernel_pack.KernelPack(path, pack_digest(isa.level(level))) if path.is_file() else None


def pack_digest(target: isa.ISA) -> str:
    """Return a digest of what packed kernels are compiled with and for."""
    versions = [_version(p) for p in ("numba", "llvmlite")]
    text = "\0".join([*versions, target.cpu, target.feature_string])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def adopt(directory: Path, key: KernelKey) -> bool:
    """Return whether a kernel of the same code exists under another name, and give it this one too."""
    path = directory / key.code_name
    return read_entry(path) is not None and _give_name(path, directory / key.file_name)


def keep_code(directory: Path, key: KernelKey) -> None:
    """Give a newly compiled kernel its second name."""
    _give_name(directory / key.file_name, directory / key.code_name)


def _give_name(path: Path, name: Path) -> bool:
    """Link a file under another name, or copy it where the file system has no links."""
    temporary = name.with_name(f".{name.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            temporary.write_bytes(path.read_bytes())
        temporary.replace(name)
        temporary.unlink(missing_ok=True)  # names of one file replace each other without effect
    except OSError:
        return False
    return True


def pack_entry(symbol: str, code: bytes) -> bytes:
    """Return the contents of a cache file."""
    return f"{_MAGIC} {hashlib.sha256(code).hexdigest()} {symbol}\n".encode() + code


def read_entry(path: Path) -> tuple[str, bytes] | None:
    """Return (symbol, object code) of a cache file; None if it is absent or damaged."""
    try:
        return _unpack_entry(path.read_bytes())
    except OSError:
        return None


def _unpack_entry(contents: bytes) -> tuple[str, bytes] | None:
    head, _, code = contents.partition(b"\n")
    magic, _, rest = head.partition(b" ")
    digest, _, symbol = rest.partition(b" ")
    if magic != _MAGIC.encode() or digest != hashlib.sha256(code).hexdigest().encode():
        return None
    return symbol.decode(errors="replace"), code
