"""Read the compiled kernels that the package ships: ptx/<file>.ptx.xz for every .cu file, and ptx/manifest.json.

`tools/build_ptx.py` writes both: PTX for compute capability 8.0, which the driver turns into code of the GPU at hand
once per machine (its own cache keeps that). Manifest: per file the SHA-256 of its sources and its kernels, with
argument types (q: 64 bit, i: int, f: float), most threads, static shared memory, registers by target, and the
instructions of the longest loop on sm_90.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.errors import IkError

FOLDER = Path(__file__).parent / "ptx"


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """A shipped kernel: `types` has a letter per argument; registers and bytes of spills by target ("sm_90")."""

    name: str
    file: str
    types: str
    max_threads: int
    static_shared: int
    registers: Mapping[str, int] = field(default_factory=dict)
    spills: Mapping[str, int] = field(default_factory=dict)
    loop: int = 0


class Package:
    """Kernels by name, PTX by file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise IkError(f"the compiled GPU kernels in {folder} cannot be read ({e}); install ik again") from e
        self.files: dict[str, str] = {name: facts["sha256"] for name, facts in manifest["files"].items()}
        self.kernels: dict[str, KernelFacts] = {
            name: KernelFacts(name, file, **k)
            for file, facts in manifest["files"].items()
            for name, k in facts["kernels"].items()
        }
        self.version: str = manifest["ptx"]
        self.nvrtc: str = manifest["nvrtc"]

    @classmethod
    def installed(cls) -> Package:
        """Return the package that belongs to the installation."""
        return _installed()

    def kernel(self, name: str) -> KernelFacts:
        """Return the facts of a kernel."""
        if name not in self.kernels:
            raise IkError(f"internal error: kernel {name} is not in the package")
        return self.kernels[name]

    def ptx(self, file: str) -> bytes:
        """Return the PTX text of a source file."""
        path = self._folder / f"{file}.ptx.xz"
        try:
            return lzma.decompress(path.read_bytes())
        except (OSError, lzma.LZMAError) as e:
            raise IkError(f"{path} cannot be read ({e}); install ik again") from e


@functools.cache
def _installed() -> Package:
    return Package(FOLDER)
