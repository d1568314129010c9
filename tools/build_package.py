"""Build the source distribution and, from its content with compiled kernels, the wheel: `build_package.py DIR`.

Nothing is written into the checkout. The sdist comes from a copy of the files that git does not ignore, and the wheel
from the unpacked sdist, so a file missing from the sdist is noticed. The wheel also gets the kernels that nearly every
run needs (`build_kernels.py`); where they do not fit the machine, it compiles its own. Uses the setuptools of this
environment, without network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from build_kernels import build_packs

from ikcli.native import kernel_pack

ROOT = Path(__file__).resolve().parents[1]
KERNELS = Path("ikcli") / kernel_pack.FOLDER.relative_to(kernel_pack.FOLDER.parents[1])
_IGNORED = ("__pycache__", "*.egg-info", ".git", ".venv", "build", "dist", ".*_cache", ".hypothesis")
_BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def copy_sources(target: Path) -> None:
    """Copy the files of the checkout, without build outputs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:  # not a checkout: an unpacked sdist
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_IGNORED))
        return
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel (`kind`); return its path."""
    command = [sys.executable, "-c", _BUILD, kind, str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"building the {kind} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return out / done.stdout.strip().splitlines()[-1]


def build_package(out: Path, packs: Path) -> tuple[Path, Path]:
    """Build both files in `out`, the wheel with all packs of kernels in a folder; return (sdist, wheel)."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ik-package-") as folder:
        work = Path(folder)
        copy_sources(work / "copy")
        sdist = build("sdist", work / "copy", out)
        with tarfile.open(sdist) as archive:
            archive.extractall(work / "unpacked", filter="data")
        (source,) = (work / "unpacked").iterdir()
        shutil.copytree(packs, source / KERNELS)
        return sdist, build("wheel", source, out)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ik-kernels-") as packs:
        build_packs(Path(packs))
        for path in build_package(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"), Path(packs)):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
