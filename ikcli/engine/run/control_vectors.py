"""Control vectors: files of directions, and what the ones in use add to the outputs of layers.

All directions in use form one sum per layer, which is a weight of the graph. Other vectors can therefore be used while
the model runs, in the layers for which the graph has a sum (`ControlVectors.layers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams
from ikcli.quant.decode import dequantize
from ikcli.settings.adapters import AdapterConfig

F32 = npt.NDArray[np.float32]


class VectorUse(NamedTuple):
    """A control vector, named by a digest of its directions, with a scale, in layers first to last."""

    digest: str
    scale: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ControlVector:
    """The directions of a file by layer."""

    path: Path
    digest: str
    directions: Mapping[int, F32]

    @classmethod
    def open(cls, path: Path, hp: HParams) -> ControlVector:
        """Read a file; raise FormatError unless it is a control vector for a model like this one."""
        file, found = open_gguf(path), {}
        for name, t in file.tensors.items():
            word, _, number = name.partition(".")
            if word != "direction" or not number.isdigit() or int(number) == 0:
                raise FormatError(
                    f"{path}: tensor '{name}' is not named direction.N with N from 1 on; this is not a control vector"
                )
            if t.type != GGMLType.F32 or tuple(t.shape) != (hp.n_embd,):
                shape = " x ".join(map(str, t.shape))
                raise FormatError(
                    f"{path}: '{name}' should hold {hp.n_embd} float32 values as the model is wide, but is {shape}"
                )
            if int(number) < hp.n_layer:
                found[int(number)] = dequantize(file.data(name), t.type, tuple(t.shape))
                if not np.isfinite(found[int(number)]).all():
                    raise FormatError(f"{path}: tensor '{name}' holds NaN or Inf")
        if not file.tensors:
            raise FormatError(f"{path}: the file has no tensor direction.N; this is not a control vector")
        digest = hashlib.sha256()
        for il in sorted(found):
            digest.update(f"{il} ".encode() + found[il].tobytes())
        return cls(path, digest.hexdigest()[:32], found)


@dataclass(slots=True)
class ControlVectors:
    """`known` vectors by digest, those `given` on the command line, and the `layers` that can have any.

    A layer's output has `n_stream` rows of `n_embd` values side by side; a direction is added to each of them.
    """

    known: dict[str, ControlVector] = field(default_factory=dict)
    given: tuple[tuple[Path, VectorUse], ...] = ()
    layers: tuple[int, ...] = ()
    n_embd: int = 0
    n_stream: int = 1

    @classmethod
    def open(cls, config: AdapterConfig, hp: HParams) -> ControlVectors:
        """Open the files of the command line; with a folder for more of them, all layers have a sum."""
        given = [(path, 1.0) for path in config.control_vector]
        given += [(s.path, s.scale) for s in config.control_vector_scaled]
        first, last = config.control_vector_layer_range or (1, hp.n_layer)
        known: dict[str, ControlVector] = {}
        uses = []
        for path, scale in given:
            vector = ControlVector.open(path, hp)
            known[vector.digest] = vector
            uses.append((path, VectorUse(vector.digest, scale, first, last)))
        changed = {il for v in known.values() for il in v.directions if first <= il <= last}
        layers = range(1, hp.n_layer) if config.control_vector_path is not None else sorted(changed)
        return cls(known, tuple(uses), tuple(layers), hp.n_embd, max(hp.n_stream, 1))

    def direction(self, il: int, uses: Iterable[VectorUse]) -> F32:
        """Return what these uses add to the output of a layer."""
        total = np.zeros(self.n_embd, np.float32)
        for use in uses:
            direction = self.known[use.digest].directions.get(il)
            if direction is not None and use.first <= il <= use.last:
                total += np.float32(use.scale) * direction
        return np.tile(total, self.n_stream)


def in_use(uses: Iterable[VectorUse]) -> tuple[VectorUse, ...]:
    """Return the uses that change something, in a fixed order."""
    return tuple(sorted(use for use in uses if use.scale != 0))
