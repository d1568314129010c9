"""Describe the origin of a result as a text: an interrupted run may only resume where it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.gguf.unfinished import part_path

if TYPE_CHECKING:
    from ikcli.quant.job import QuantizeJob

_CODE = ("convert", "quant")


def run_key(job: QuantizeJob) -> str:
    """Return the key: input files (by size and time), settings of the encoders, and their code.

    Types and keys are in the header of the result.
    """
    parts = [_code(), repr(job.encode_options), *map(_stamp, job.file.paths)]
    parts += [f"{c.name} {c.source} {c.old.name}" for c in job.choices]
    if job.imatrix is not None:
        parts += [_stamp(Path(job.imatrix.path)), repr(sorted(job.imatrix.entries)), repr(sorted(job.imatrix.dropped))]
    if job.covariance is not None:
        parts.append(_stamp(Path(job.covariance.path)))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def left_bytes(final: Path) -> int:
    """Return the bytes that an interrupted run left of this file; the result will replace them."""
    try:
        return part_path(final).stat().st_size
    except OSError:
        return 0


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return f"{path} is gone"
    return f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a digest of the code that makes the bytes."""
    digest = hashlib.sha256()
    for name in _CODE:
        for path in _sources(Path(str(files("ikcli").joinpath(name)))):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterable[Path]:
    return sorted(folder.rglob("*.py"))
