"""Plan with some parts of a split file missing: the architecture supplies the tensors of the others.

Their names and shapes are known. Their types are copied from the same tensor of the nearest block that is present. This
is an assumption, as files mix types; it is reported, and only plans make it.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod

from ikcli import models
from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES, tensor_n_bytes
from ikcli.models import HParams

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def assume_missing(file: GGUFFile, hp: HParams) -> list[str]:
    """Add the tensors of missing parts to `file` without data; return the notices for the user."""
    if not file.missing_parts:
        return []
    seen = _types_by_role(file)
    if not any(role != name for name, role in ((n, _role(n)[1]) for n in file.tensors)):
        raise FormatError(
            f"{file.missing_parts[0]} is missing, and the parts that are there hold no block of the model; a plan "
            "needs at least the header (the first few MB) of one more part"
        )
    n_before = len(file.tensors)
    for name, spec in models.find(hp.arch, hp.source).tensor_shapes(hp).items():
        il, role = _role(name)
        required = spec.required and _role(spec.unless)[1] not in seen
        if name in file.tensors or not (required or role in seen or name == "output.weight"):
            continue
        type_ = _type_like(seen, il, role, spec.shape)
        n_bytes = tensor_n_bytes(type_, spec.shape)
        file.tensors[name] = TensorInfo(name, spec.shape, type_, n_bytes, prod(spec.shape), 0, len(file.paths))
    n_assumed = len(file.tensors) - n_before
    listed = file.missing_parts[0].name + (", ..." if len(file.missing_parts) > 1 else "")
    notices = [
        f"{len(file.missing_parts)} parts are missing ({listed}): {n_assumed} tensors are assumed to have the types of "
        "those that are there, so sizes may differ"
    ]
    if file.n_announced not in (-1, len(file.tensors)):
        notices.append(f"the file announces {file.n_announced} tensors, {len(file.tensors)} are accounted for")
    return notices


def missing_data(file: GGUFFile) -> list[str]:
    """Say which data is missing from a file that was opened by its header."""
    lacking = [t for t in file.tensors.values() if not file.has_data(t.name)]
    if not lacking:
        return []
    size = sum(t.n_bytes for t in lacking) / 2**30
    return [
        f"{file.paths[0]}: the data of {len(lacking)} of {len(file.tensors)} tensors ({size:.2f} GiB) is missing: "
        "enough for a plan, not for a run"
    ]


def _role(name: str) -> tuple[int, str]:
    """Split a name into its block (-1: none) and the name inside the block."""
    found = _BLOCK.fullmatch(name)
    return (int(found[1]), found[2]) if found else (-1, name)


def _types_by_role(file: GGUFFile) -> dict[str, dict[int, GGMLType]]:
    seen: dict[str, dict[int, GGMLType]] = {}
    for name, tensor in file.tensors.items():
        il, role = _role(name)
        seen.setdefault(role, {})[il] = tensor.type
    return seen


def _type_like(seen: dict[str, dict[int, GGMLType]], il: int, role: str, shape: tuple[int, ...]) -> GGMLType:
    """Return the type of the same tensor in the nearest block, else the most frequent type that suits the row size."""
    if role in seen:
        return seen[role][min(seen[role], key=lambda other: abs(other - il))]
    if len(shape) == 1 or role.startswith("ffn_gate_inp"):
        return GGMLType.F32
    if role == "output.weight" and "token_embd.weight" in seen:
        return seen["token_embd.weight"][-1]
    counts = Counter(t for types in seen.values() for t in types.values() if t != GGMLType.F32)
    fitting = [t for t, _ in counts.most_common() if shape[0] % TYPES[t].block_size == 0]
    return fitting[0] if fitting else GGMLType.F16
