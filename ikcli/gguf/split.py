"""Split a GGUF file into parts and merge parts into one file; tensor bytes are copied unchanged.

Corresponds to llama-gguf-split: parts are named `OUT-00001-of-0000N.gguf`, the first one carries all metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.errors import UsageError
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.writer import SPLIT_KEYS, GGUFWriter, NewTensor, plan_splits, split_path

_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PartSummary:
    """The contents of one part."""

    path: Path
    n_tensors: int
    n_bytes: int


def split(
    source: str,
    prefix: str,
    max_tensors: int = 0,
    max_bytes: int = 0,
    no_tensor_first: bool = False,
    dry_run: bool = False,
    advance: Callable[[float], None] = lambda n: None,
) -> list[PartSummary]:
    """Write the model in parts of at most `max_tensors` tensors or `max_bytes` bytes (0: no limit)."""
    file = open_gguf(source)
    specs = tensor_specs(file)
    counts = plan_splits(specs, max_tensors, max_bytes, no_tensor_first)
    out = Path(prefix)
    starts = np.cumsum([0, *counts])
    parts = [
        PartSummary(split_path(out, i, len(counts)), n, sum(s.n_bytes for s in specs[starts[i] : starts[i] + n]))
        for i, n in enumerate(counts)
    ]
    if not dry_run:
        refuse_inputs(file, [p.path for p in parts])
        keys = {k: v for k, v in file.typed_metadata().items() if k not in SPLIT_KEYS}
        with GGUFWriter(out, keys, specs, alignment=file.alignment, splits=counts) as writer:
            copy_tensors(file, writer, advance)
        if len(counts) == 1:  # the writer gives a single part the plain name
            out.replace(parts[0].path)
    return parts


def merge(
    source: str, output: str, dry_run: bool = False, advance: Callable[[float], None] = lambda n: None
) -> list[PartSummary]:
    """Merge the model whose first part is `source` into one file, which must not exist yet."""
    file = open_gguf(source)
    specs = tensor_specs(file)
    out = Path(output)
    if out.exists():
        raise UsageError(f"{out} exists already; name another output file")
    if not dry_run:
        refuse_inputs(file, [out])
        keys = {k: v for k, v in file.typed_metadata().items() if k not in SPLIT_KEYS}
        with GGUFWriter(out, keys, specs, alignment=file.alignment) as writer:
            copy_tensors(file, writer, advance)
    return [PartSummary(out, len(specs), sum(s.n_bytes for s in specs))]


def tensor_specs(file: GGUFFile) -> list[NewTensor]:
    """Return the tensors of a model in the form that a writer expects."""
    return [NewTensor(t.name, t.shape, t.type) for t in file.tensors.values()]


def refuse_inputs(file: GGUFFile, outputs: list[Path]) -> None:
    """Raise a UsageError if an output is one of the input files; create missing directories."""
    inputs = {p.resolve() for p in file.paths}
    for path in outputs:
        if path.resolve() in inputs:
            raise UsageError(f"{path} is the input; name another output")
        path.parent.mkdir(parents=True, exist_ok=True)


def copy_tensors(file: GGUFFile, writer: GGUFWriter, advance: Callable[[float], None]) -> None:
    """Copy all tensors unchanged."""
    for t in file.tensors.values():
        writer.write_tensor(t.name, _pieces(file, t.name, t.n_bytes, advance))


def _pieces(
    file: GGUFFile, name: str, n_bytes: int, advance: Callable[[float], None]
) -> Iterator[npt.NDArray[np.uint8]]:
    data = file.data(name)
    for start in range(0, n_bytes, _CHUNK_BYTES):
        piece = data[start : start + _CHUNK_BYTES]
        yield piece
        file.release(name, start, start + len(piece))
        advance(len(piece))
