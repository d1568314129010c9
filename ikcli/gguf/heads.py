"""Blocks that predict further tokens (multi-token prediction, MTP; NextN) in a file: which they are, and what to keep.

They are the last blocks of a model. A file of heads alone numbers them as the whole model does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import numpy as np

from ikcli.errors import UsageError
from ikcli.gguf.constants import GGUFValueType
from ikcli.gguf.reader import GGUFFile

FURTHER = "nextn_predict_layers"
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ALONE = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")
_NO_BLOCK = -1


class Heads(Enum):
    """Which blocks a file gets: all, only the model's, or only those that predict further tokens."""

    KEPT = auto()
    DROPPED = auto()
    ALONE = auto()  # with embeddings, last norm and output matrix, as llama.cpp drafts with them


def block_of(name: str) -> int:
    """Return the number of a tensor's block; -1 if it is in none."""
    found = _BLOCK.match(name)
    return int(found[1]) if found else _NO_BLOCK


def head_blocks(names: Iterable[str], metadata: Mapping[str, Any]) -> frozenset[int]:
    """Return the blocks of heads: those with `nextn` tensors, else the last ones, as the metadata says."""
    found = [(int(m[1]), m[2]) for name in names if (m := _BLOCK.match(name))]
    named = frozenset(il for il, part in found if part.startswith("nextn."))
    arch = metadata.get("general.architecture", "")
    count, last = (metadata.get(f"{arch}.{key}", 0) for key in ("block_count", FURTHER))
    if named or not isinstance(count, int) or not isinstance(last, int) or not 0 < last < count:
        return named
    return frozenset(il for il, _ in found if il >= count - last)


def select_heads(file: GGUFFile, heads: Heads) -> GGUFFile:
    """Return a file with the wanted blocks, its keys adjusted; raise UsageError if it has no others to drop.

    Files of heads alone keep the keys of the whole model, whose blocks they number.
    """
    if heads is Heads.KEPT:
        return file
    path, mine = file.paths[0], head_blocks(file.tensors, file.metadata)
    option = "--mtp" if heads is Heads.ALONE else "--no-mtp"
    if not mine:
        raise UsageError(f"{path}: {option}: the file has no layers that predict further tokens (MTP)")
    first = min(mine)
    if heads is Heads.ALONE:
        kept = {n: t for n, t in file.tensors.items() if block_of(n) in mine or n in _ALONE}
        return replace(file, tensors=kept)
    if not any(0 <= block_of(name) < first for name in file.tensors):
        raise UsageError(f"{path}: {option}: the file has nothing but layers that predict further tokens (MTP)")
    tensors = {n: t for n, t in file.tensors.items() if block_of(n) < first}
    return replace(file, tensors=tensors, **_keys_without(file, first))


def _keys_without(file: GGUFFile, n_layer: int) -> dict[str, Any]:
    """Return metadata and types of a model without blocks from `n_layer` on; arrays with a value per block shrink."""
    arch, metadata, types = file.arch, dict(file.metadata), dict(file.value_types)
    count = file.get(f"{arch}.block_count")
    for key, value in file.metadata.items():
        if key.startswith(f"{arch}.") and isinstance(value, list | np.ndarray) and len(value) == count:
            metadata[key] = value[:n_layer]
    for key, number in ((f"{arch}.block_count", n_layer), (f"{arch}.{FURTHER}", 0)):
        if key in metadata:
            metadata[key], types[key] = number, GGUFValueType.UINT32
    return {"metadata": metadata, "value_types": types}
