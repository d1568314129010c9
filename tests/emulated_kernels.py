"""The kernel sources compiled with g++ against kernels/emu.h, a library per file, kept in the cache of kernels."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from build_ptx import KERNELS, sources

from ikcli.native.kernel_cache import cache_root

used: set[str] = set()  # names of the files that this process has run kernels of
_COMMAND = ("g++", "-std=c++17", "-x", "c++", "-DIK_EMU")
_FLAGS = ("-g1", "-shared", "-fPIC", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv",
          "-fno-gnu-unique", "-fno-threadsafe-statics", "-fno-exceptions", "-fvisibility=hidden",
          "-fstack-clash-protection", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
          "-w")  # fmt: skip
_MAIN = """
#include "{file}"
static const emu::Entry ik_entries[] = {{ {entries} }};
#define IK_API extern "C" __attribute__((visibility("default")))
IK_API int ik_count() {{ return sizeof ik_entries / sizeof *ik_entries; }}
IK_API const char* ik_name(int i) {{ return ik_entries[i].name; }}
IK_API const char* ik_types(int i) {{ return ik_entries[i].types; }}
IK_API int ik_max_threads(int i) {{ return ik_entries[i].max_threads; }}
IK_API const char* ik_message() {{ return emu::message; }}
IK_API int ik_launch(int i, const unsigned* grid, int block, size_t shared, const u64* args, u64 seed) {{
  return emu::launch(ik_entries[i].call, grid, block, shared, args, seed);
}}
"""
_ENTRY = re.compile(r"ik_entry_mark\s+(?:static\s+)?(?:ik_bounds_mark\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*)?void\s+"
                    r"(?:ik_bounds_mark\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*)?(\w+)\s*\(")  # fmt: skip


class KernelError(AssertionError):
    """A kernel did something that a GPU would punish, or worse, would not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An emulated kernel: types has one of q (64 bit), i (int), f (float) per argument."""

    library: ctypes.CDLL
    index: int
    name: str
    types: str
    max_threads: int


def compiler_missing() -> str | None:
    """Why kernels cannot be emulated here."""
    return None if shutil.which("g++") else "g++ is needed to emulate CUDA kernels"


@functools.cache
def _host() -> str:
    """What -march=native and the compiler's output depend on."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    try:
        cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        cpu = ""
    return version + cpu


def _optimization(source: Path) -> str:
    """Return the level at which compiling and running the tests takes least: attention works long on every block."""
    return "-O2" if source.name.startswith("attn_") else "-O1"


def source_digest(source: Path) -> str:
    """Digest of a kernel file, of what it includes, and of the compiler."""
    h = hashlib.sha256("".join([_host(), _MAIN, *_COMMAND, _optimization(source), *_FLAGS]).encode())
    for path in (*sources(source), KERNELS / "emu.h"):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:24]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], target: Path, source: Path) -> None:
    """Run the compiler into a temporary file beside `target`, then rename."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(handle)
    try:
        result = subprocess.run([*command, "-o", name], capture_output=True, text=True, check=False)
        if result.returncode:
            raise KernelError(f"{source.name} does not compile:\n{result.stderr[:6000]}")
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _scan(source: Path, folder: Path) -> list[tuple[str, str]]:
    """Names and launch bounds of the kernels of a file, from its preprocessed text."""
    target = folder / "scan.txt"
    if not target.is_file():
        with _lock(folder / "scan.lock"):
            if not target.is_file():
                _compile([*_COMMAND, "-E", "-P", "-DIK_EMU_SCAN", f"-I{KERNELS}", str(source)], target, source)
    text = target.read_text()
    return [(name, (a or b or "1024").split(",")[0]) for a, b, name in _ENTRY.findall(text)]


def _folder(source: Path) -> Path:
    folder = cache_root() / "cuda-emulation" / f"{source.stem}-{source_digest(source)}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _library(source: Path) -> Path:
    """The compiled kernels of a file."""
    folder = _folder(source)
    target = folder / "lib.so"
    if not target.is_file():
        entries = _scan(source, folder)
        with _lock(folder / "lock"):
            if not target.is_file():
                main = folder / "main.cpp"
                rows = ", ".join(f"IK_EMU_ENTRY({name}, {bound})" for name, bound in entries)
                main.write_text(_MAIN.format(file=source, entries=rows))
                _compile([*_COMMAND, _optimization(source), *_FLAGS, f"-I{KERNELS}", str(main)], target, source)
    return target


def compile_files(names: Iterable[str], say: Callable[[str], object]) -> None:
    """Compile files of kernels that the cache lacks, on all cores."""
    paths = [KERNELS / name for name in sorted(names, reverse=True)]  # those of weights take longest
    if missing := [p for p in paths if p.is_file() and not (_folder(p) / "lib.so").is_file()]:
        say(f"files of GPU kernels that are compiled for the emulation first: {len(missing)}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for error in [done.exception() for done in [pool.submit(_library, p) for p in missing]]:
                if error:
                    say(str(error))


@functools.cache
def _load(source: Path, digest: str) -> dict[str, Entry]:
    library = ctypes.CDLL(str(_library(source)))
    if source.parent == KERNELS:
        used.add(source.name)
    for name in ("ik_name", "ik_types", "ik_message"):
        getattr(library, name).restype = ctypes.c_char_p
    library.ik_launch.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p,
                                  ctypes.c_uint64)  # fmt: skip
    found = [
        Entry(library, i, library.ik_name(i).decode(), library.ik_types(i).decode(), library.ik_max_threads(i))
        for i in range(library.ik_count())
    ]
    return {e.name: e for e in found}


def load(source: str | Path) -> dict[str, Entry]:
    """The kernels of a .cu file (a name in kernels/, or a path), compiled unless the cache has them."""
    path = KERNELS / source
    return _load(path, source_digest(path))


@functools.cache
def _file_of() -> dict[str, Path]:
    """Kernel name -> source file, over all of kernels/."""
    names: dict[str, Path] = {}
    for source in sorted(KERNELS.glob("*.cu")):
        for name, _ in _scan(source, _folder(source)):
            if name in names:
                raise KernelError(f"kernel {name} is defined in {names[name].name} and {source.name}")
            names[name] = source
    return names


@functools.cache
def kernel(name: str) -> Entry:
    """An emulated kernel by name; compiles its file on first use."""
    files = _file_of()
    if name not in files:
        raise KernelError(f"no kernel {name} in {KERNELS}")
    return load(files[name])[name]
