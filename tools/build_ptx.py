"""Compile the GPU kernels: ikcli/backends/cuda/kernels/*.cu -> ikcli/backends/cuda/ptx/.

NVRTC turns every file into PTX for compute capability 8.0; its `.version` line is lowered so that older drivers take
it. ptxas then assembles exactly that text for every GPU generation, as a driver would, and the build fails on spilled
registers (but see `spill_limit`), on more registers than a block can have, or on a kernel without __launch_bounds__.
Files whose sources did not change are kept.

    python tools/build_ptx.py              write what changed
    python tools/build_ptx.py --check F..  compile and assemble only, print registers by target (all files if none)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ikcli.native.kernel_cache import cache_root  # noqa: E402

KERNELS = ROOT / "ikcli" / "backends" / "cuda" / "kernels"
FOLDER = ROOT / "ikcli" / "backends" / "cuda" / "ptx"
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
PTX_VERSION = "7.4"  # the first with L2 prefetch and no_allocate hints; CUDA 11.4 and every later driver take it
NVRTC = (13, 0)
ASSEMBLER = "13.0.88"  # version of nvidia-cuda-nvcc, which has ptxas
OPTIONS = ("--gpu-architecture=compute_80", "--std=c++17")
COMMAND = "python tools/build_ptx.py"
_TYPES = {"u64": "q", "s64": "q", "b64": "q", "u32": "i", "s32": "i", "b32": "i", "f32": "f"}
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)(.*?)\{", re.S)
_USED = re.compile(
    r"Compiling entry function '(\w+)' for '\w+'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.S,
)


class BuildError(Exception):
    """The kernels do not compile, or not well enough to be shipped."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a kernel needs on one target."""

    registers: int
    spills: int  # bytes stored and loaded
    stack: int
    shared: int  # static
    loop: int  # instructions of the longest loop


def sources(path: Path) -> list[Path]:
    """Return a kernel file and the headers that it includes, directly or not.

    The emulation is not part of the GPU's code.
    """
    found: dict[Path, None] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        if file in found or file.name == "emu.h":
            continue
        found[file] = None
        for name in re.findall(r'^\s*#include "([^"]+)"', file.read_text(), re.M):
            todo.append(file.parent / name if (file.parent / name).is_file() else KERNELS / name)
    return sorted(found)


def digest(path: Path) -> str:
    """Return the SHA-256 of everything that the PTX of a file depends on."""
    h = hashlib.sha256(repr((OPTIONS, PTX_VERSION, NVRTC, ASSEMBLER)).encode())
    for file in sources(path):
        h.update(file.name.encode() + b"\0" + file.read_bytes())
    return h.hexdigest()


def compile_ptx(path: Path) -> str:
    """Return the PTX of a kernel file, `.version` lowered; raise BuildError with the compiler's messages."""
    from cuda.bindings import nvrtc

    if tuple(nvrtc.nvrtcVersion()[1:]) != NVRTC:
        raise BuildError(f"NVRTC {NVRTC[0]}.{NVRTC[1]} is needed: pip install -e '.[dev]'")
    code, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], [])
    if int(code):
        raise BuildError(f"NVRTC does not start: {code}")
    options = [o.encode() for o in (*OPTIONS, f"-I{path.parent}", f"-I{KERNELS}")]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    if int(code):
        raise BuildError(f"{path.name} does not compile:\n{log.decode(errors='replace')}")
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    ptx, n = re.subn(r"^\.version \S+$", f".version {PTX_VERSION}", text.rstrip(b"\0").decode(), count=1, flags=re.M)
    if n != 1:
        raise BuildError(f"{path.name}: the compiler's output has no version line")
    return ptx


def entries(ptx: str) -> dict[str, tuple[str, int]]:
    """Return the kernels of a PTX text: name -> (argument types, most threads of a block)."""
    found = {}
    for name, params, directives in _ENTRY.findall(ptx):
        kinds = re.findall(r"\.param \.(\w+)", params)
        bound = re.search(r"\.maxntid (\d+)", directives)
        if bound is None:
            raise BuildError(f"kernel {name} has no __launch_bounds__")
        if any(k not in _TYPES for k in kinds):
            raise BuildError(
                f"kernel {name} takes something else than 64-bit integers, pointers, int and float: {kinds}"
            )
        found[name] = "".join(_TYPES[k] for k in kinds), int(bound[1])
    return found


def ptxas() -> Path:
    """Return the assembler of the package that the dev extra pins; raise BuildError if it is missing."""
    try:
        package = metadata.distribution("nvidia-cuda-nvcc")
    except metadata.PackageNotFoundError as e:
        raise BuildError("ptxas is needed: pip install -e '.[dev]'") from e
    found = next((file for file in package.files or () if file.name == "ptxas"), None)
    if found is None or package.version != ASSEMBLER:
        raise BuildError(f"ptxas of nvidia-cuda-nvcc {ASSEMBLER} is needed: pip install -e '.[dev]'")
    return Path(str(package.locate_file(found)))


def loops(cubin: bytes, target: str) -> dict[str, int]:
    """Return the instructions of the longest loop of every kernel.

    That is the farthest backward branch in the kernel's section of the ELF file. Instructions have 16 bytes. Branches
    (opcode 0x947) count words of 4 bytes from the next instruction on, in bits 34 to 81; from sm_90 on those are the
    upper bits, and the lower eight are bits 16 to 23.
    """
    table, (size, n, strings) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(n)]
    names, found = sections[strings][4], {}
    for name_at, _, _, _, start, length in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        if not name.startswith(".text."):
            continue
        longest = 0
        for at in range(start, start + length, 16):
            word = int.from_bytes(cubin[at : at + 16], "little")
            if word & 0xFFF != 0x947:
                continue
            words, bits = word >> 34 & (1 << 48) - 1, 48
            if int(target.removeprefix("sm_")) >= 90:
                words, bits = words << 8 | word >> 16 & 255, 56
            if words >> (bits - 1):
                longest = max(longest, ((1 << bits) - words) // 4)
        found[name.removeprefix(".text.")] = longest
    return found


def assemble(ptx: str, target: str) -> dict[str, Usage]:
    """Assemble PTX for one target; results are cached by the text. Raise BuildError if that fails."""
    key = hashlib.sha256(f"{ASSEMBLER} {target} loop {ptx}".encode()).hexdigest()[:32]
    cached = cache_root() / "ptx-usage" / f"{key}.json"
    try:
        return {name: Usage(*numbers) for name, numbers in json.loads(cached.read_text()).items()}
    except (OSError, ValueError, TypeError):
        pass
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.ptx"
        cubin = source.with_suffix(".cubin")
        source.write_text(ptx)
        command = [str(ptxas()), f"-arch={target}", "-v", str(source), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise BuildError(f"PTX does not assemble for {target}: {result.stderr[:4000]}")
        longest = loops(cubin.read_bytes(), target)
    log = result.stderr
    usage = {}
    for name, stack, stores, loads, registers, rest in _USED.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        usage[name] = Usage(int(registers), int(stores) + int(loads), int(stack), int(shared[1]) if shared else 0,
                            longest[name])  # fmt: skip
    if set(usage) != set(entries(ptx)):
        raise BuildError(f"the assembler's report for {target} lacks {sorted(set(entries(ptx)) - set(usage))}")
    cached.parent.mkdir(parents=True, exist_ok=True)
    part = cached.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({n: (u.registers, u.spills, u.stack, u.shared, u.loop) for n, u in usage.items()}))
    part.replace(cached)
    return usage


def spill_limit(kernel: str) -> int:
    """Return the bytes of registers that a kernel may spill.

    The registers of an `mm_*` are a balance: a few spilled bytes per step of a tile cost less than fewer blocks on an
    SM or codes that are read late (both were tried on a GPU).
    """
    return 256 if kernel.startswith("mm_") else 0


def faults(bounds: dict[str, tuple[str, int]], usage: dict[str, Usage], target: str) -> list[str]:
    """Return the reasons against shipping kernels."""
    found = []
    for name, used in usage.items():
        threads = bounds[name][1]
        if used.spills > spill_limit(name):
            found.append(f"{name} spills {used.spills} bytes of registers on {target} ({used.registers} registers)")
        if -(-used.registers // 8) * 8 * threads > 65536:
            found.append(f"{name} needs {used.registers} registers x {threads} threads on {target}")
        if used.shared > min(49152, SHARED_LIMIT[target]):
            found.append(f"{name} has {used.shared} bytes of static shared memory on {target}")
    return found


def build(path: Path, targets: Iterable[str] = TARGETS) -> tuple[str, dict[str, Any], list[str]]:
    """Return the PTX of a file, its manifest record, and its faults."""
    key, ptx = digest(path), compile_ptx(path)
    bounds = entries(ptx)
    usage = {target: assemble(ptx, target) for target in targets}
    wrong = [fault for target, used in usage.items() for fault in faults(bounds, used, target)]
    kernels = {
        name: {
            "types": types,
            "max_threads": threads,
            "static_shared": max(used[name].shared for used in usage.values()),
            "registers": {target: used[name].registers for target, used in usage.items()},
            "spills": {target: used[name].spills for target, used in usage.items() if used[name].spills},
            "loop": usage["sm_90"][name].loop if "sm_90" in usage else 0,
        }
        for name, (types, threads) in sorted(bounds.items())
    }
    return ptx, {"sha256": key, "kernels": kernels}, wrong


def stale(folder: Path = FOLDER) -> list[str]:
    """Return the files whose PTX is missing, left over, or older than its sources."""
    have = read_manifest(folder)["files"]
    want = {path.stem: path for path in KERNELS.glob("*.cu")}
    return sorted(
        name
        for name in {*have, *want}
        if name not in want or name not in have or have[name]["sha256"] != digest(want[name])
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return {"files": {}}
    return manifest


def write(folder: Path, jobs: int, only: Sequence[str] = ()) -> list[str]:
    """Build what changed, file by file; return the faults.

    Faulty files are written all the same, since the tests report them too.
    """
    files, wrong = dict(read_manifest(folder)["files"]), []
    folder.mkdir(exist_ok=True)
    changed = [name for name in stale(folder) if not only or name in only]
    paths = [path for name in changed if (path := KERNELS / f"{name}.cu").is_file()]
    for name in {*changed} - {path.stem for path in paths}:
        del files[name]
        (folder / f"{name}.ptx.xz").unlink(missing_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for path, (ptx, facts, faulty) in zip(paths, pool.map(build, paths), strict=True):
            packed = lzma.compress(ptx.encode(), preset=9 | lzma.PRESET_EXTREME)
            (folder / f"{path.stem}.ptx.xz").write_bytes(packed)
            files[path.stem] = facts
            wrong += faulty
            _write_manifest(folder, files)
            print(f"{path.stem}: {len(facts['kernels'])} kernels, {len(packed)} bytes", flush=True)
    _write_manifest(folder, files)
    names = [kernel for facts in files.values() for kernel in facts["kernels"]]
    return wrong + [f"kernel {n} is defined twice" for n in sorted({n for n in names if names.count(n) > 1})]


def _write_manifest(folder: Path, files: dict[str, Any]) -> None:
    record = {"ptx": PTX_VERSION, "nvrtc": ".".join(map(str, NVRTC)), "files": dict(sorted(files.items()))}
    (folder / "manifest.json").write_text(_manifest_text(record))


def _manifest_text(record: dict[str, Any]) -> str:
    """Return JSON with one line per kernel."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\n {5,}", " ", text).replace("\n    }", " }") + "\n"


def check(paths: list[Path], jobs: int) -> list[str]:
    """Compile and assemble; print registers, spills, stack and static shared memory by kernel and target."""
    wrong: list[str] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for path, (ptx, facts, faulty) in zip(paths, pool.map(build, paths), strict=True):
            print(f"{path.name}: {len(ptx)} bytes of PTX; registers on {' '.join(TARGETS)}")
            for name, k in facts["kernels"].items():
                numbers = " ".join(f"{r:3}" for r in k["registers"].values())
                print(
                    f"  {name:40} {numbers}  threads {k['max_threads']} shared {k['static_shared']} loop {k['loop']} "
                    f"args {k['types']}"
                )
            wrong += faulty
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", type=Path, metavar="FILE", help="only compile and assemble these")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="of what changed, write these files")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    args = parser.parse_args()
    try:
        if args.check is not None:
            paths = [p if p.exists() else KERNELS / p.name for p in args.check] or sorted(KERNELS.glob("*.cu"))
            wrong = check(paths, args.jobs)
        else:
            wrong = write(FOLDER, args.jobs, args.only)
    except BuildError as e:
        wrong = [str(e)]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
