"""Compute digests of models and other files: the SHA-256 of all bytes, or of what tells two models apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ikcli.errors import IkError
from ikcli.gguf.constants import GGUF_MAGIC
from ikcli.gguf.reader import GGUFFile, open_gguf

_PIECE = 1 << 16


def of_model(file: GGUFFile) -> str:
    """Return a digest of the header and of samples of every tensor; files of hundreds of GB are not read whole."""
    hashed = hashlib.sha256(repr(sorted((n, t.type, t.shape) for n, t in file.tensors.items())).encode())
    for name in sorted(file.tensors):
        data = file.data(name)
        hashed.update(data[:_PIECE].tobytes())
        hashed.update(data[-_PIECE:].tobytes())
        file.release(name)  # a pipeline stage samples all tensors but keeps only its own in memory
    return hashed.hexdigest()


def of_file(path: Path) -> str:
    """Return a digest of all bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise IkError(f"cannot read {path}: {error.strerror or error}") from None


def of_input(path: Path) -> str:
    """Return a digest of a file that a server reads: of a model its header and samples, of other files all bytes."""
    try:
        with path.open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                return of_file(path)
            model = open_gguf(path)
            file.seek(0)
            header = file.read(model.data_start)
    except OSError as error:
        raise IkError(f"cannot read {path}: {error.strerror or error}") from None
    return hashlib.sha256(header + of_model(model).encode()).hexdigest()
