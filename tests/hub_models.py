"""Model files for the tests of downloads, as bytes: tiny, with a vocabulary that fills most of the header."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from factories import tiny_model
from gguf_files import write_model

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.split import split

N_TOKENS = 40_000  # their texts alone are more than the first piece that is read of a header


@functools.cache
def model_bytes(type_: GGMLType = GGMLType.F16, name: str = "tiny", arch: str = "llama") -> bytes:
    """A whole model."""
    model = tiny_model(arch, type_=type_)
    vocabulary = {
        "general.name": name,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"token number {i}" for i in range(N_TOKENS)],
        "tokenizer.ggml.scores": [float(-i) for i in range(N_TOKENS)],
        "tokenizer.ggml.bos_token_id": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        return write_model(model, Path(folder) / "m.gguf", model.metadata | vocabulary).read_bytes()


@functools.cache
def part_bytes(n: int, type_: GGMLType = GGMLType.F16) -> tuple[bytes, ...]:
    """The same in `n` parts."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "m.gguf"
        whole.write_bytes(model_bytes(type_))
        n_tensors = -(-21 // n)
        parts = split(str(whole), str(Path(folder) / "part"), max_tensors=n_tensors)
        assert len(parts) == n
        return tuple(part.path.read_bytes() for part in parts)
