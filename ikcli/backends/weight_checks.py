"""Check the requirements of all backends on the type of a weight."""

from __future__ import annotations

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Weight


def check_f32(w: Weight, what: str) -> None:
    """Raise UnsupportedError for a weight that kernels read only as float32; `what` describes such weights."""
    if w.type is not GGMLType.F32:
        raise UnsupportedError(f"{w.name} is {TYPES[w.type].name}; {what} have to be f32")
