"""What is installed: wheel and sdist, each in a separate environment, away from the sources; container files."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools

import ikcli
from ikcli.backends.cpu.threads import LAUNCH
from ikcli.native import isa, kernel_cache, kernel_pack
from ikcli.native.compile_pool import compile_kernels

ROOT = Path(__file__).resolve().parents[1]
NEEDED = 77  # version of setuptools that builds without the package wheel and knows license expressions


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel)."""
    if int(setuptools.__version__.partition(".")[0]) < NEEDED:
        pytest.skip(f"setuptools {setuptools.__version__} is older than {NEEDED}")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        tool = importlib.import_module("build_package")
    finally:
        sys.path.pop(0)
    packs = tmp_path_factory.mktemp("packs")
    level = isa.packed_level(isa.current())
    if level is not None:  # in place of a build for all levels, a kernel of this machine
        compile_kernels([LAUNCH])
        contents = (kernel_cache.cache_dir() / LAUNCH.file_name).read_bytes()
        digest = kernel_cache.pack_digest(isa.level(level))
        kernel_pack.write_pack(packs / kernel_pack.pack_name(level), digest, {LAUNCH.file_name: contents})
    sdist, wheel = tool.build_package(tmp_path_factory.mktemp("dist"), packs)
    return sdist, wheel


def install(package: Path, folder: Path) -> Path:
    """An environment with this package alone and the dependencies of the one that runs the tests; its programs."""
    venv.create(folder, with_pip=False)
    bin_dir = folder / ("Scripts" if os.name == "nt" else "bin")
    site = next((folder / "lib").glob("python*/site-packages"), folder / "Lib" / "site-packages")
    # only folders: what is named in .pth files of that environment, the sources for one, is not found by this
    own = [p for p in (sysconfig.get_paths()["purelib"], *sys.path) if p.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(own)) + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(bin_dir / "python"), "install", "--quiet", "--no-deps"]
    command += ["--no-index", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return bin_dir


def ik(bin_dir: Path, folder: Path, *argv: str) -> str:
    """Standard output of the installed program, run from elsewhere."""
    done = subprocess.run([str(bin_dir / "ik"), *argv], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_installed(built: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    bin_dir = install(built[kind == "wheel"], tmp_path / "env")
    where = "import ikcli, ikcli.settings.run; print(ikcli.__file__)"
    found = subprocess.run([str(bin_dir / "python"), "-c", where], cwd=tmp_path, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path), found.stderr
    assert ik(bin_dir, tmp_path, "version").startswith(f"ik {ikcli.__version__}")
    table = ik(bin_dir, tmp_path, "sweep-bench", "-c", "512", "-ub", "256", "-n", "16")
    assert len([line for line in table.splitlines() if re.match(r"\| +256 \|", line)]) == 2, table
    assert "Final estimate: PPL" in ik(bin_dir, tmp_path, "perplexity", "--chunks", "1")
    package = Path(found.stdout.strip()).parent
    assert len(list((package / "backends" / "cuda" / "ptx").glob("*.ptx.xz"))) == len(
        list((ROOT / "ikcli" / "backends" / "cuda" / "ptx").glob("*.ptx.xz"))
    )
    assert ik(bin_dir, tmp_path, "help", "placement") == (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_brings_kernels(built: tuple[Path, Path], tmp_path: Path) -> None:
    if isa.packed_level(isa.current()) is None:
        pytest.skip("no level of packed kernels suits this machine")
    bin_dir = install(built[1], tmp_path / "env")
    code = "from ikcli.backends.cpu.threads import LAUNCH, WORKER; from ikcli.native.kernel_cache import is_cached; "
    code += "print(is_cached(LAUNCH), is_cached(WORKER))"
    env = os.environ | {"IK_CACHE_DIR": str(tmp_path / "empty")}
    found = subprocess.run([bin_dir / "python", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.stdout == "True False\n", found.stderr


@pytest.mark.slow
def test_wheel_holds_all_data(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    package = ROOT / "ikcli"
    expected = {f"ikcli/{p.relative_to(package).as_posix()}" for p in package.rglob("*") if p.is_file()}
    expected = {name for name in expected if "__pycache__" not in name and not name.endswith((".cu", ".cuh", ".h"))}
    expected |= {f"ikcli/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert expected <= names, sorted(expected - names)
    assert not [name for name in names if name.endswith((".cu", ".cuh", ".h"))]
    others = {name for name in names if not name.startswith("ikcli/")}
    assert {name.split("/")[0] for name in others} == {f"ikcli-{ikcli.__version__}.dist-info"}


@pytest.mark.slow
def test_sdist_holds_tests_documents_and_tools(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for folder in ("tests", "docs", "tools", "benchmarks", "ikcli"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        lacking = [p for p in files if p.relative_to(ROOT).as_posix() not in names]
        assert not [p for p in lacking if p.suffix in (".py", ".md", ".json", ".c", ".cu", ".cuh", ".js", ".gguf")]
    assert {"README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "setup.py", ".ci/run", "Dockerfile"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_version_is_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ikcli.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", ikcli.__version__)
    assert f"\n## {ikcli.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_data_files_are_declared() -> None:
    """Every file of the package that is no module matches a pattern of package-data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["ikcli"]
    package = ROOT / "ikcli"
    declared = {path for pattern in patterns for path in package.glob(pattern)}
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts}
    # sources of the GPU kernels are compiled by tools/build_ptx.py; installed is their PTX
    assert {p for p in files - declared if p.suffix not in (".cu", ".cuh", ".h")} == set()


INSTRUCTIONS = {"FROM", "COPY", "RUN", "ENV", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD", "USER", "WORKDIR", "ARG"}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_container_files(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    stages = re.findall(r"^FROM \S+ AS (\S+)$", "\n".join(lines), re.M)
    for line in lines:
        if line.startswith("COPY"):
            *sources, target = [word for word in line.split()[1:] if not word.startswith("--")]
            stage = re.search(r"--from=(\S+)", line)
            assert stage is None or stage[1] in stages
            assert stage is not None or all((ROOT / source).exists() for source in sources), line
            assert target.startswith("/")
    assert lines[0].startswith("FROM python:3.") and lines[-2:] == ['ENTRYPOINT ["ik"]', 'CMD ["serve"]']
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "ik" in project["project"]["scripts"]
    minor = {int(found) for found in re.findall(r"^FROM python:3\.(\d+)", "\n".join(lines), re.M)}
    assert min(minor) >= int(project["project"]["requires-python"].rpartition(".")[2])
    from ikcli.settings.option import iter_options

    config = importlib.import_module("ikcli.settings.run").RunConfig
    known = {name for bound in iter_options(config) for name in bound.option.variables} | {
        "HF_HOME",
        "LLAMA_CACHE",
        "IK_CACHE_DIR",
    }
    settings = {word.partition("=")[0] for line in lines if line.startswith("ENV") for word in line.split()[1:]}
    assert {s for s in settings if not s.startswith("NVIDIA_")} <= known


def test_what_containers_do_not_get() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv"} <= set(ignored) and not {"ikcli", "docs", "setup.py"} & set(ignored)
