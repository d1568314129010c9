"""Units of a study: groups of tensors, each combined with each type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile
from ikcli.gguf.types import TYPES
from ikcli.quant.calibration import role
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.measure import fits
from ikcli.rules import compile_pattern


@dataclass(frozen=True, slots=True)
class StudyUnit:
    """One measurement: these tensors in this type, all others unchanged."""

    title: str
    tensors: tuple[str, ...]
    type: GGMLType

    @property
    def key(self) -> str:
        """The name in the journal."""
        return f"{self.title} {TYPES[self.type].name}"


@dataclass(frozen=True, slots=True)
class Left:
    """Tensors that cannot be measured in a type, or in any (None), and the reason."""

    type: GGMLType | None
    tensors: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of measurements: passes over the text, weights to encode, and the most bytes of tensors held at a time.

    Passes are an upper bound; a pass that begins halfway through the layers is half a pass.
    """

    passes: float
    n_weights: int
    most_bytes: int


def work_of(units: Sequence[StudyUnit], file: GGUFFile) -> Work:
    """Compute the work of these measurements."""
    n_layer = 1 + max((_block(name) for name in file.tensors), default=-1)
    passes, n_weights, most = 0.0, 0, 0
    for unit in units:
        first = min(_block(name) if _block(name) >= 0 else _outside(name, n_layer) for name in unit.tensors)
        passes += 1 - first / max(1, n_layer)
        n_weights += sum(file.tensors[name].n_elements for name in unit.tensors)
        most = max(most, sum(file.tensors[name].n_bytes for name in unit.tensors))
    return Work(passes, n_weights, most)


def _block(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _outside(name: str, n_layer: int) -> int:
    """Return the layer at which a tensor outside of the blocks is used: the output matrix after them, others before."""
    return n_layer if name.startswith("output") else 0


def make_units(
    file: GGUFFile,
    used: Iterable[str],
    types: Sequence[GGMLType],
    *,
    by: str = "tensor",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    imatrix: Imatrix | None = None,
) -> tuple[list[StudyUnit], list[Left]]:
    """Return units in file order, and what had to be left out; UsageError if nothing is left.

    `used`: the tensors that the model computes with; changing others has no effect. By `tensor`, up and gate experts of
    a block stay together, as fused kernels require; by `role`, the tensors of one name in all blocks; by `block`, all
    tensors of one.
    """
    known, names = set(used), [n for n in file.tensors if is_matrix(file, n)]
    wanted = [compile_pattern(p, "--tensors", p).search for p in include]
    unwanted = [compile_pattern(p, "--exclude", p).search for p in exclude]
    names = [n for n in names if not wanted or any(s(n) for s in wanted)]
    names = [n for n in names if not any(s(n) for s in unwanted)]
    idle = tuple(n for n in names if n not in known)
    names = [n for n in names if n in known]
    if not names:
        unused = f" (the model does not use {idle[0]})" if idle else ""
        raise UsageError(f"no tensor is left to measure; ik inspect --tensors lists them{unused}")
    units: list[StudyUnit] = []
    left = [Left(None, idle, "the model does not use them")] if idle else []
    for type in types:
        least, unfit = TYPES[type], tuple(n for n in names if not fits(type, file.tensors[n].shape))
        if unfit:
            left.append(Left(type, unfit, f"their rows are not a multiple of {least.block_size}"))
        bare = () if not least.needs_imatrix else tuple(n for n in names if not _weighted(imatrix, file, n))
        if bare:
            left.append(Left(type, bare, "the type needs an importance matrix that covers them (--imatrix)"))
        can = [n for n in names if n not in unfit and n not in bare]
        units += [StudyUnit(title, members, type) for title, members in _groups(can, by).items()]
    if not units:
        raise UsageError(f"no tensor can be measured in these types: {left[-1].reason}")
    order = {title: i for i, title in enumerate(_groups(names, by))}
    return sorted(units, key=lambda u: (order[u.title], TYPES[u.type].bpw)), left


def is_matrix(file: GGUFFile, name: str) -> bool:
    """Return whether quantizers change a tensor: weights with at least two dimensions, except routers."""
    t = file.tensors[name]
    return name.endswith(".weight") and len(t.shape) > 1 and "ffn_gate_inp" not in name and "_norm" not in name


def _weighted(imatrix: Imatrix | None, file: GGUFFile, name: str) -> bool:
    return imatrix is not None and imatrix.find(name, file.tensors[name].shape) is not None


def _groups(names: Sequence[str], by: str) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_title(name, by), []).append(name)
    return {title: tuple(members) for title, members in found.items()}


def _title(name: str, by: str) -> str:
    stem = name.removesuffix(".weight")
    if by == "tensor":
        return stem.replace("ffn_gate_exps", "ffn_up_exps")
    if by == "role":
        return role(name).removesuffix(".weight")
    block = re.match(r"blk\.\d+", name)
    return block[0] if block else stem
