"""Keep weights of 4 bits as GGUF blocks, bit for bit, with the factors of NVFP4 beside them as in llama.cpp.

`<x>.scale` multiplies the product with `<x>.weight`: one number, or one for each expert. `<x>.input_scale` is what a
runtime that quantizes activations divides them by; `ik` does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ikcli.convert.pieces import Numbers, Piece, TensorRows, n_rows_of
from ikcli.convert.quantized import Dequantized

_ENDINGS = ((".scale", Dequantized.factors), (".input_scale", Dequantized.inputs))
FACTORED = re.compile(
    r"(blk\.\d+\.(attn_(q|k|v|qkv|output|gate|q_a|q_b|kv_a_mqa)|ffn_(gate|up|down|gate_up)(_exps|_shexp)?|ssm_(in|out))"
    r"|output)\.weight"
)
"""Matrices of products, which all architectures multiply by the factor beside them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of blocks of a type, and the numbers beside them by the names of their tensors."""

    type: str
    pieces: Sequence[Piece]
    numbers: dict[str, Numbers] = field(default_factory=dict)


def kept(
    source: Dequantized, name: str, pieces: Sequence[Piece], shape: Sequence[int], types: Collection[str]
) -> Kept | None:
    """Return the same rows as blocks, or None unless all of them can be read as such and have the same factors."""
    found: list[TensorRows] = []
    rows: list[TensorRows] = []
    for p in pieces:
        if not isinstance(p, TensorRows) or p.columns is not None or p.factor != 1.0:
            return None
        blocks = source.packed(p.name, types)
        if blocks is None or source.shape(blocks) != source.shape(p.name):
            return None
        found.append(p)
        rows.append(replace(p, name=blocks))
    type = {source.dtype(p.name) for p in rows}
    if len(type) != 1:
        return None
    numbers: dict[str, Numbers] = {}
    for ending, of in _ENDINGS:
        names = [of(source, p.name) for p in found]
        if not any(names):
            continue
        beside = _numbers(source, found, [n for n in names if n is not None], shape) if all(names) else None
        if beside is not None:
            numbers[name.removesuffix(".weight") + ending] = beside
        elif ending == ".scale":
            return None
    if any(n.endswith(".scale") for n in numbers) and not FACTORED.fullmatch(name):
        return None
    return Kept(type.pop(), rows, numbers)


def _numbers(
    source: Dequantized, pieces: Sequence[TensorRows], names: Sequence[str], shape: Sequence[int]
) -> Numbers | None:
    """Return the number of every matrix of the new tensor, or None if the rows of one have several."""
    n_rows = shape[1]
    found: list[set[tuple[str, int]]] = [set() for _ in range(shape[2] if len(shape) > 2 else 1)]
    start = 0
    for p, name in zip(pieces, names, strict=True):
        per = n_rows_of(source.shape(p.name)) // math.prod(source.shape(name))
        at = 0
        while at < p.n_rows:
            matrix = (start + at) // n_rows
            stop = min(p.n_rows, (matrix + 1) * n_rows - start)
            rows = np.array([p.first + at, p.first + stop - 1]) if p.order is None else p.order[at:stop]
            found[matrix] |= {(name, int(i)) for i in np.unique(rows // per)}
            at = stop
        start += p.n_rows
    return Numbers(tuple(f.pop() for f in found)) if all(len(f) == 1 for f in found) else None
