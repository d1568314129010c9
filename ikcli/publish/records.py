"""Records of a published folder: options, files, quants and their measured quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.gguf.reader import GGUFFile


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The user's options; `models` and `results` are (label or "", file).

    `reuse`: accept an existing folder if it was made from the same files and options.
    """

    models: Sequence[tuple[str, Path]]
    out: Path
    name: str = ""
    base_model: str = ""
    license: str = ""
    max_bytes: int = 0
    imatrix: Path | None = None
    results: Sequence[tuple[str, Path]] = ()
    notes: Sequence[str] = ()
    sources: Sequence[Path] = ()
    link: bool = False
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class PublishedQuant:
    """A quant: its label, its files in the folder, type, sizes, and measurements as name -> (value, error)."""

    label: str
    paths: tuple[str, ...]
    type: str
    n_bytes: int
    bpw: float
    recipe: str
    quality: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """The folder, made or planned; `sources` are (name, SHA-256) of the files the quants were made from."""

    out: Path
    name: str
    base_model: str
    license: str
    tags: tuple[str, ...]
    languages: tuple[str, ...]
    imatrix: str
    notes: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    quants: tuple[PublishedQuant, ...]


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """A folder that can be made: the models, and the tensors of each part of them; or one that `is_made`."""

    options: PublishOptions
    files: Sequence[GGUFFile]
    splits: Sequence[list[int]]
    made: Published
    is_made: bool = False
