"""The packaged PTX: as new as its sources, what the build tool would write, and assembled for every GPU generation."""

from __future__ import annotations

import importlib
from pathlib import Path

import build_ptx as tool
import pytest
from build_ptx import KERNELS

from ikcli.backends.cuda.modules import FOLDER, Package

FILES = sorted(path.stem for path in KERNELS.glob("*.cu"))
LARGEST = 400_000  # bytes of PTX that assemble in a second or two


def _missing() -> str | None:
    try:
        importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
        tool.ptxas()
    except (ImportError, RuntimeError, tool.BuildError) as e:
        return f"the compiler of GPU kernels is not installed: {e}"
    return None


needs_compiler = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(FOLDER)


@pytest.mark.parametrize("name", FILES)
def test_ptx_is_as_new_as_its_sources(name: str, package: Package) -> None:
    assert package.files.get(name) == tool.digest(KERNELS / f"{name}.cu"), f"run {tool.COMMAND}"


def test_nothing_is_left_over(package: Package) -> None:
    assert set(package.files) <= set(FILES), f"run {tool.COMMAND}"
    assert {path.name for path in FOLDER.iterdir()} == {"manifest.json", *(f"{name}.ptx.xz" for name in package.files)}


def test_kernels_fit_every_target(package: Package) -> None:
    wrong = []
    for kernel in package.kernels.values():
        assert set(kernel.registers) == set(tool.TARGETS)
        limit = tool.spill_limit(kernel.name)
        wrong += [f"{kernel.name} spills {n} bytes on {target}" for target, n in kernel.spills.items() if n > limit]
        for target, registers in kernel.registers.items():
            if -(-registers // 8) * 8 * kernel.max_threads > 65536:
                wrong.append(f"{kernel.name}: {registers} registers x {kernel.max_threads} threads on {target}")
        if kernel.static_shared > 48 << 10:
            wrong.append(f"{kernel.name}: {kernel.static_shared} bytes of static shared memory")
    assert not wrong


def test_weights_are_decoded_once_for_all_rows(package: Package) -> None:
    """Instructions of the longest loop of `mv_*`: a block of two weight rows, decoded once, and eight activation rows.

    Decoding them again for every row takes 900 to 2700 where once takes less than 700 (up to 1300 with the codebooks of
    32 and 64 values, most of which is decoding).
    """
    large = {"mv_iq5_k": 1000, "mv_iq6_k": 1300, "mv_iq5_ks": 900, "mv_iq2_kl": 800, "mv_iq3_kt": 850, "mv_iq4_kt": 850}
    loops = {k.name: k.loop for k in package.kernels.values() if k.name.startswith("mv_")}
    assert len(loops) > 40 and all(n > 100 for n in loops.values())
    assert not {name: n for name, n in loops.items() if n > large.get(name.removesuffix("_one"), 700)}


@pytest.mark.parametrize("name", FILES)
def test_manifest_describes_the_ptx(name: str, package: Package) -> None:
    text = package.ptx(name).decode()
    assert f".version {tool.PTX_VERSION}\n.target sm_80\n" in text and package.version == tool.PTX_VERSION
    expected = {k.name: (k.types, k.max_threads) for k in package.kernels.values() if k.file == name}
    assert tool.entries(text) == expected


@needs_compiler
def test_compiling_gives_the_packaged_text(package: Package) -> None:
    ptx, facts, wrong = tool.build(KERNELS / "util.cu")
    assert ptx == package.ptx("util").decode() and not wrong
    assert facts == tool.read_manifest(FOLDER)["files"]["util"]


@needs_compiler
@pytest.mark.parametrize("name", FILES)
def test_assembles(name: str, package: Package) -> None:
    """One target per file of moderate size; the others with -m slow."""
    text = package.ptx(name).decode()
    if len(text) > LARGEST:
        pytest.skip("large: with -m slow")
    _assemble(name, text, tool.TARGETS[FILES.index(name) % len(tool.TARGETS)], package)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", tool.TARGETS)
@pytest.mark.parametrize("name", FILES)
def test_assembles_everywhere(name: str, target: str, package: Package) -> None:
    _assemble(name, package.ptx(name).decode(), target, package)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_compiling_gives_the_packaged_texts(name: str, package: Package) -> None:
    assert tool.compile_ptx(KERNELS / f"{name}.cu") == package.ptx(name).decode(), f"run {tool.COMMAND}"


def _assemble(name: str, text: str, target: str, package: Package) -> None:
    usage = tool.assemble(text, target)
    assert not tool.faults(tool.entries(text), usage, target)
    for kernel, used in usage.items():
        facts = package.kernel(kernel)
        assert facts.file == name and facts.registers[target] == used.registers
        assert facts.static_shared >= used.shared and (target != "sm_90" or facts.loop == used.loop)


@needs_compiler
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('extern "C" __global__ void k(float* y) { y[0] = 1; }', "no __launch_bounds__"),
        (
            'extern "C" __global__ void __launch_bounds__(32) k(double* y, double x) { y[0] = x; }',
            "something else than",
        ),
        ('extern "C" __global__ void __launch_bounds__(32) k(float* y) { y[0] = z; }', 'identifier "z" is undefined'),
    ],
)
def test_what_cannot_be_shipped_is_refused(body: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(f'#include "common.cuh"\n{body}\n')
    with pytest.raises(tool.BuildError, match=message):
        tool.build(source, ("sm_90",))


@needs_compiler
def test_spills_are_found(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        '#include "common.cuh"\nextern "C" __global__ void __launch_bounds__(1024) k(float* y, int n) {\n'
        "  float v[96];\n#pragma unroll\n  for (int i = 0; i < 96; i++) v[i] = y[i * n];\n  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < 96; i++) y[(95 - i) * n + threadIdx.x] = v[i] * v[(i * 7) % 96];\n}\n"
    )
    assert any("spills" in fault for fault in tool.build(source, ("sm_80",))[2])
