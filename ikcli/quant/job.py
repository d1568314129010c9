"""Describe a quantize job: the tensors and their types, the files to write, and the hooks of a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.gguf.reader import GGUFFile
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import NewTensor
from ikcli.quant.covariance_file import Covariance
from ikcli.quant.encoders import EncodeOptions
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.recipes import TypeChoice


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """The tensors to write; `output` is a file, or with `keep_split` the name before `-00001-of-0000N.gguf`."""

    file: GGUFFile
    output: Path
    choices: Sequence[TypeChoice]
    metadata: dict[str, Typed]
    imatrix: Imatrix | None = None
    covariance: Covariance | None = None
    n_threads: int = 1
    encode_options: EncodeOptions = field(default_factory=EncodeOptions)
    keep_split: bool = False
    skip_existing: bool = False
    allow_requantize: bool = False
    force: bool = False
    splits: tuple[int, ...] = ()  # tensors of each file of the result, if it is not one file or split as the input is


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One output file."""

    path: Path
    metadata: dict[str, Typed]
    choices: tuple[TypeChoice, ...]

    def specs(self) -> list[NewTensor]:
        return [NewTensor(c.name, c.shape, c.new) for c in self.choices]

    @property
    def n_bytes(self) -> int:
        return sum(c.n_bytes for c in self.choices)


@dataclass(slots=True)
class JobProgress:
    """Hooks of a running job: `tensor(number, choice)` before each tensor, `skipped(path)`, `advance(input bytes)`.

    `resumed(path, n)`: n tensors are there already. `discarded(path)`: a partial file of another result was dropped.
    """

    tensor: Callable[[int, TypeChoice], None] = lambda number, choice: None
    skipped: Callable[[Path], None] = lambda path: None
    advance: Callable[[float], None] = lambda n_bytes: None
    resumed: Callable[[Path, int], None] = lambda path, n: None
    discarded: Callable[[Path], None] = lambda path: None
