"""Run tests of the kernels on an emulated ARM64 machine: `arm64_tests.py FOLDER [LEVEL...] [-- PYTEST ARGUMENTS]`.

FOLDER receives, once, a Debian for ARM64 (by debootstrap, as root) and the wheels of NumPy, Numba and llvmlite in the
versions of this environment. Tests run there under `qemu-aarch64-static`, on a processor of each level (default: all).
Kernels are compiled on this machine, by the cross-compiler, as in tools/build_kernels.py: emulated, that would take
minutes each. On Debian and Ubuntu: `apt-get install debootstrap qemu-user-static`.

Without arguments for pytest it runs one product per family of types, and attention, norms and the vector operations.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from ikcli.native import isa

ROOT = Path(__file__).resolve().parents[1]
RELEASE, MIRROR = "bookworm", "http://deb.debian.org/debian"
PROCESSORS = {"i8mm": "max", "dotprod": "neoverse-n1", "neon": "cortex-a72"}
WHEELS = ("numpy", "numba", "llvmlite")
TYPES = (
    "q4_0", "q5_0", "q8_0", "q4_K", "q2_K", "q6_K", "iq4_xs", "iq4_k", "iq2_ks", "iq2_kt", "iq3_s", "iq1_m", "mxfp4",
    "q8_0_r8", "q4_k_r4", "iq4_ks_r4", "iq2_xxs_r4",
)  # fmt: skip
SUBSET = (
    *(f"test_cpu_formats.py::test_exact_activations[{name}]" for name in TYPES),
    *(f"test_cpu_matmul.py::test_mul_mat[{name}]" for name in ("f32", "f16", "bf16", "bf16_r16")),
    "test_cpu_attention.py::test_one_token",
    "test_cpu_attention.py::test_prompts",
    "test_cpu_ops.py::test_rms_norm",
    "test_cpu_ops.py::test_softcap",
    "test_cpu_simd.py::test_dots",
    "test_cpu_simd.py::test_rounding_to_halves",
)
# Runs in the emulated process. Programs that it starts run on this machine, so kernels are compiled here.
_START = """
import sys
sys.path[:0] = {paths!r}
sys.path.append({others!r})
sys.executable = {python!r}
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def system(folder: Path) -> Path:
    """Return the root of a Debian for ARM64 with Python, which is made if it is not there."""
    root = folder / "debian"
    if not (root / "made").is_file():
        shutil.rmtree(root, ignore_errors=True)
        command = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", "--include=python3", RELEASE]
        subprocess.run([*command, str(root), MIRROR], check=True, stdout=subprocess.DEVNULL)
        for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):  # unpacked is enough: nothing is set up
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        (root / "made").touch()
    return root


def emulated(root: Path, processor: str) -> list[str]:
    """Return the beginning of a command that runs Python on an emulated processor."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        raise SystemExit("qemu-aarch64-static is not installed: apt-get install qemu-user-static")
    return [emulator, "-cpu", processor, "-L", str(root), str((root / "usr/bin/python3").resolve())]


def wheels(folder: Path, python: list[str]) -> Path:
    """Return a folder with the packages that contain machine code, for the Python of the emulated machine."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    minor = subprocess.run([*python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    wanted = [f"{name}=={version(name)}" for name in WHEELS]
    packages = folder / f"packages-{minor}-{'-'.join(wanted)}"
    if not packages.is_dir():
        downloads = folder / "downloads"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", minor, "--dest", str(downloads)]
        for platform in ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64"):
            command += ["--platform", platform]
        subprocess.run([*command, *wanted], check=True)
        for wheel in downloads.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
    return packages


def run_tests(folder: Path, level: str, arguments: list[str]) -> int:
    """Run tests on a processor of a level; return pytest's exit code."""
    python = emulated(system(folder), PROCESSORS[level])
    packages = wheels(folder, python)
    others = str(Path(__import__("pytest").__file__).resolve().parents[1])  # packages without machine code
    start = _START.format(
        paths=[str(packages), str(ROOT), str(ROOT / "tests")], others=others, python=os.path.abspath(sys.executable)
    )
    target = isa.level(level)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "IK_BUILD_ISA": level,
        "IK_CACHE_DIR": str(folder / "cache"),
        "NUMBA_CPU_NAME": target.cpu,  # of what tests compile themselves, emulated
        "NUMBA_CPU_FEATURES": target.feature_string,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = ["-p", "xdist.plugin", "-p", "no:cacheprovider", "-n", "0", "-m", ""]
    return subprocess.run([*python, "-c", start, *options, *arguments], cwd=ROOT / "tests", env=env).returncode


def main() -> int:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    tests = sys.argv[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("levels", nargs="*", choices=[*PROCESSORS, []])
    args = parser.parse_args(sys.argv[1:end])
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for level in args.levels or PROCESSORS:
        print(f"{level}: {PROCESSORS[level]}", flush=True)
        failed |= run_tests(folder, level, tests or list(SUBSET))
    return failed


if __name__ == "__main__":
    sys.exit(main())
