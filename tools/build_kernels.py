"""Compile the kernels that nearly every run needs, for every level of processors: `build_kernels.py FOLDER [LEVEL...]`.

Writes one pack per level (`ikcli/native/kernel_pack.py`), for the operating system that this runs on, or the one in
IK_BUILD_SYSTEM (`darwin`). The processor need not know the instructions, nor be of the architecture, since nothing is
run. The kernels are those that are planned for the bundled model and
for models of the common architectures and types, by the commands that generate, serve and measure. Compiled kernels
stay in the kernel cache, so a second build takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from make_random_model import PRESETS, Preset, metadata, shapes, tensor_type, tensors_of

from ikcli.backends.cpu.threads import LAUNCH, WORKER
from ikcli.cli.parser import parse
from ikcli.engine.plan.sizes import session_of
from ikcli.engine.plan.startup import prepare
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import NewTensor, header_bytes
from ikcli.native import isa, kernel_cache, kernel_pack
from ikcli.native.compile_pool import compile_kernels
from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import KernelLibrary
from ikcli.sampling.short import DRAW
from ikcli.settings.run import default_model

MIXES = (
    "Q4_K_M", "Q8_0", "Q4_0", "F16", "BF16", "Q6_K", "IQ4_XS", "Q5_K_M", "Q3_K_M", "IQ4_NL", "Q2_K", "IQ3_XXS",
    "IQ2_XS", "IQ4_K", "IQ4_KS",
)  # fmt: skip
EXPERT_MIXES = ("Q4_K_M", "Q8_0", "Q4_0", "Q3_K_M", "IQ4_XS")
DENSE = ("llama", "qwen2", "qwen3", "gemma3", "qwen35")
EXPERTS = ("qwen3moe", "deepseek2", "glm4moe", "qwen35moe")
COMMANDS = (
    ("chat", "-c", "4096"),
    ("chat", "-c", "4096", "-ctk", "q8_0", "-ctv", "q8_0"),
    ("serve", "-c", "8192", "-np", "4"),
    ("sweep-bench", "-c", "1024", "-ub", "256"),
    ("perplexity",),
)
MOST_BYTES = 25 << 20  # of all packs together
ALL = [level for levels in isa.PACKED.values() for level in levels]


def models() -> Iterator[tuple[str, str]]:
    """Yield preset and mix of every model whose kernels are packed."""
    for arch in DENSE:
        for mix in MIXES if arch == "llama" else MIXES[:2]:
            yield arch, mix
    for arch in EXPERTS:
        for mix in EXPERT_MIXES if arch == "qwen3moe" else EXPERT_MIXES[:1]:
            yield arch, mix
    yield "gpt-oss", "MXFP4"


def write_header(path: Path, arch: str, mix: str) -> None:
    """Write a model of the right size without its weights, which planning does not read."""
    preset = PRESETS[arch].changed(6 if arch in ("gemma3", "qwen35", "qwen35moe") else 2, 2048, None)
    file_type, tensors = tensors_of(preset, mix) if mix != "MXFP4" else (38, _experts_as_published(preset))
    placed, offset = [], 0
    for t in tensors:
        placed.append((t.name, t.shape, t.type, offset))
        offset += -(-t.n_bytes // 32) * 32
    header = header_bytes(metadata(preset, file_type), placed, 3)
    with path.open("wb") as file:
        file.write(header + bytes(-len(header) % 32))
        file.truncate(file.tell() + offset)


def _experts_as_published(preset: Preset) -> list[NewTensor]:
    """Return the tensors of a model with experts in MXFP4 and the rest in Q8_0."""
    kinds = {True: GGMLType.MXFP4, False: GGMLType.Q8_0}
    return [NewTensor(n, s, tensor_type(n, s, kinds["exps" in n])) for n, s in shapes(preset).items()]


def planned(path: Path, wanted: dict[KernelKey, None]) -> None:
    """Plan the commands with a model and add the kernels that they would load."""

    def require(self: KernelLibrary, keys: Iterable[KernelKey], progress: object = None) -> None:
        wanted.update(dict.fromkeys(keys))

    usual, KernelLibrary.require = KernelLibrary.require, require  # type: ignore[method-assign]
    try:
        for command, *argv in COMMANDS:
            startup = prepare(parse(command, ["-m", str(path), *argv]).config)
            config, sizes = session_of(startup.config)
            prepared = startup.planner.prepare(config, sizes)
            prepared.runner.prepare(list(prepared.programs.values()))
    finally:
        KernelLibrary.require = usual  # type: ignore[method-assign]


def kernels() -> list[KernelKey]:
    """Return the kernels to pack for the level in IK_BUILD_ISA."""
    wanted = dict.fromkeys([LAUNCH, WORKER, DRAW])
    planned(default_model(), wanted)
    with tempfile.TemporaryDirectory() as folder:
        for arch, mix in models():
            path = Path(folder) / f"{arch}-{mix}.gguf"
            write_header(path, arch, mix)
            planned(path, wanted)
            path.unlink()
    return list(wanted)


def build_level(path: Path) -> None:
    """Compile and write the pack of the level in IK_BUILD_ISA."""
    keys = kernels()
    compile_kernels(keys, lambda done, total: print(f"\r{path.name}: {done}/{total}", end="", file=sys.stderr))
    contents = {key.file_name: (kernel_cache.cache_dir() / key.file_name).read_bytes() for key in keys}
    kernel_pack.write_pack(path, kernel_cache.pack_digest(isa.current()), contents)
    print(f"\r{path}: {len(keys)} kernels, {path.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


def build_packs(folder: Path, levels: Iterable[str] = ALL) -> None:
    """Write the packs of some levels into a folder; raise RuntimeError where one fails or they are too large."""
    for level in levels:
        env = os.environ | {"IK_BUILD_ISA": level}
        done = subprocess.run([sys.executable, __file__, "--one", str(folder / kernel_pack.pack_name(level))], env=env)
        if done.returncode:
            raise RuntimeError(f"building the kernels for {level} failed")
    n_bytes = sum(path.stat().st_size for path in folder.glob("*.pack"))
    if n_bytes > MOST_BYTES:
        raise RuntimeError(f"{folder}: kernels of {n_bytes / 1e6:.1f} MB are too large for a package")


def main() -> int:
    folder, *levels = sys.argv[1:]
    if folder == "--one":
        build_level(Path(levels[0]))
    else:
        build_packs(Path(folder), levels or ALL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
