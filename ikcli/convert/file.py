"""Present a checkpoint as a GGUF file, so that code which reads model files can read it without conversion on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.convert.pieces import NewRows
from ikcli.convert.source import CheckpointSource
from ikcli.gguf.constants import DEFAULT_ALIGNMENT, GGUF_VERSION, GGUFValueType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import row_n_bytes
from ikcli.gguf.values import Typed, infer_item_type, infer_type


@dataclass(slots=True)
class CheckpointFile(GGUFFile):
    """Tensors of a checkpoint under their GGUF names, read and rearranged on demand."""

    source: CheckpointSource | None = field(default=None, repr=False)
    rows: dict[str, NewRows] = field(default_factory=dict, repr=False)

    def has_data(self, name: str) -> bool:
        return name in self.rows

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return self.part(name, 0, self.tensors[name].n_bytes)

    def part(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        assert self.source is not None
        t = self.rows[name]
        size = row_n_bytes(t.type, t.shape[0])
        first, last = start // size, -(-stop // size)
        raw = t.read(self.source, first, last).reshape(-1).view(np.uint8)
        return raw[start - first * size : stop - first * size]

    def read_into(self, name: str, start: int, out: npt.NDArray[np.uint8]) -> None:
        out[:] = self.part(name, start, start + len(out))

    def set_key(self, key: str, value: int) -> None:
        """Set a key that depends on how the file is written."""
        self.metadata[key], self.value_types[key] = value, infer_type(value, key)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: no file is mapped."""


def checkpoint_file(
    paths: list[Path], source: CheckpointSource, tensors: Mapping[str, NewRows], metadata: Mapping[str, Any]
) -> CheckpointFile:
    """Return the file with these `tensors` and `metadata` (plain values or `Typed`)."""
    typed = {k: v if isinstance(v, Typed) else Typed(v, infer_type(v, k)) for k, v in metadata.items()}
    arrays = {k: v for k, v in typed.items() if v.type == GGUFValueType.ARRAY}
    infos = {
        t.name: TensorInfo(t.name, t.shape, t.type, t.n_bytes, int(np.prod(t.shape, dtype=np.int64)), 0)
        for t in tensors.values()
    }
    return CheckpointFile(
        paths,
        GGUF_VERSION,
        {k: v.value for k, v in typed.items()},
        {k: v.type for k, v in typed.items()},
        {k: v.item_type or infer_item_type(v.value, k) for k, v in arrays.items()},
        infos,
        DEFAULT_ALIGNMENT,
        source=source,
        rows=dict(tensors),
    )
