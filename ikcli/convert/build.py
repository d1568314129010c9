"""A model under conversion: its GGUF keys, its new tensors, and the rules that make them of those of the checkpoint.

An architecture is a record with a table. A name of the table is that of a tensor without `model.` and without
`.weight`/`.bias` (or with it, which comes first); `*` is the number of the block, `#` that of the expert. What it maps
to is a GGUF name, or a rule: a function that gets the tensor and adds what becomes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ikcli.convert.config import Config
from ikcli.convert.pieces import TYPES_OF, Constant, Floats, Matrix, NewRows, Order, Piece, TensorRows, Value, n_rows_of
from ikcli.convert.quantized import Dequantized
from ikcli.convert.source import Array, CheckpointSource
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType

_F32_NAMES = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight")
_F32_PARTS = ("_norm.weight", "ssm_conv1d")


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of the checkpoint that a rule is for."""

    name: str
    shape: tuple[int, ...]
    suffix: str  # .weight, .bias or nothing
    block: int
    expert: int

    def matrix(self) -> tuple[int, int]:
        """(rows, width); FormatError if it is no matrix."""
        if len(self.shape) != 2:
            raise FormatError(f"tensor {self.name} has the shape {list(self.shape)}, which is no matrix")
        return self.shape[0], self.shape[1]


Rule = Callable[["Build", Found], None]
Table = dict[str, "str | Rule"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of some classes become a GGUF architecture.

    `keys` writes the metadata, `table` says what becomes of tensors, `finish` adds what no tensor is behind. Tensors
    that match `drop` are left out. `harmless` are keys of config.json without consequence in this architecture.
    """

    name: str
    classes: tuple[str, ...]
    keys: Callable[[Build], None]
    table: Table
    finish: Callable[[Build], None] = lambda m: None
    drop: str = ""
    harmless: frozenset[str] = frozenset()
    strip: str = ""  # a prefix of names, beside `model.`
    further: bool = True  # False: blocks behind the last one, which predict further tokens, are left out


@dataclass(slots=True)
class Build:
    """Keys and tensors that were made so far."""

    config: Config
    source: CheckpointSource
    arch: str
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, NewRows] = field(default_factory=dict)
    experts: dict[str, dict[int, Found]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    keep_mxfp4: bool = False
    notes: list[str] = field(default_factory=list)  # what the user should know

    @property
    def n_layer(self) -> int:
        """Layers of the model, without those for further tokens."""
        return self.config.integer("num_hidden_layers", "n_layers", "n_layer", "num_layers", least=1)

    @property
    def n_further(self) -> int:
        """Layers for further tokens."""
        return int(self.metadata.get(f"{self.arch}.block_count", self.n_layer)) - self.n_layer

    def key(self, name: str, value: Any) -> None:
        """A key of the architecture; None: none."""
        if value is not None:
            self.metadata[f"{self.arch}.{name}"] = value

    def has(self, pattern: str) -> bool:
        """Whether a tensor of the checkpoint matches."""
        return any(re.search(pattern, name) for name in self.source.names)

    def add(self, name: str, pieces: Sequence[Piece], shape: tuple[int, ...] = (), value: Value | None = None) -> None:
        """A new tensor of these rows; `shape` in GGUF order where it is not (row length, rows)."""
        if name in self.tensors:
            raise FormatError(f"{self.config.path.parent}: two tensors become {name}")
        shape = shape or (pieces[0].width, sum(p.n_rows for p in pieces))
        if value is None and name.endswith("weight"):
            pieces = self._packed(pieces)
        self.tensors[name] = NewRows(name, shape, self._type(name, shape, pieces, value), pieces, value)

    def packed(self, name: str) -> str | None:
        """The name under which a tensor can be read as MXFP4 blocks, if it can and these are kept."""
        return self.source.packed(name) if self.keep_mxfp4 and isinstance(self.source, Dequantized) else None

    def _packed(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The same rows as blocks, if all of them can be read so."""
        found: list[Piece] = []
        for p in pieces:
            if not isinstance(p, TensorRows) or p.columns is not None:
                return pieces
            name = self.packed(p.name)
            if name is None or self.source.shape(name) != self.source.shape(p.name):
                return pieces
            found.append(replace(p, name=name))
        return found

    def constant(self, name: str, values: Floats) -> None:
        """A new tensor with values that were computed."""
        self.tensors[name] = NewRows(name, (values.size,), GGMLType.F32, (Constant(values),))

    def _type(self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece], value: Value | None) -> GGMLType:
        kinds = set()
        for piece in pieces:
            dtype = "F32" if isinstance(piece, Constant) else self.source.dtype(piece.name)
            if dtype not in TYPES_OF:
                where = f"{self.config.path.parent}: tensor {getattr(piece, 'name', name)}"
                raise UnsupportedError(f"{where} is of type {dtype}, and config.json does not say how to read it")
            kinds.add(TYPES_OF[dtype])
        kept = len(shape) < 2 or value is not None or not name.endswith("weight")
        if kept or name.endswith(_F32_NAMES) or any(part in name for part in _F32_PARTS) or len(kinds) > 1:
            return GGMLType.F32
        return kinds.pop()

    def plain(self, found: Found, name: str, shape: tuple[int, ...] | None = None, **how: Any) -> None:
        """A tensor as it is, or with `order` of rows, `columns` in rows, `value` of numbers; a vector is one row."""
        shape = found.shape if shape is None else shape
        value, order, columns = how.get("value"), how.get("order"), how.get("columns")
        if len(shape) < 2:
            width = shape[0] if shape else 1
            piece = TensorRows(found.name, 1, width, columns=order if order is not None else columns)
            self.add(name, (piece,), (width,), value)
            return
        n_rows = n_rows_of(found.shape)
        piece = TensorRows(found.name, n_rows, found.shape[-1], order=order, columns=columns)
        self.add(name, (piece,), tuple(reversed(shape)), value)

    def part(self, found: Found, name: str, first: int, last: int) -> None:
        """Rows [first, last) of a matrix, or elements of a vector."""
        if len(found.shape) == 1:
            self.plain(found, name, (last - first,), order=np.arange(first, last))
        else:
            self.add(name, (TensorRows(found.name, last - first, found.shape[-1], first),))


def place(name: str, found: Found) -> str:
    """A GGUF name of the table, with the number of the block and the suffix of the tensor."""
    full = name.replace("*", str(found.block))
    return full if full.endswith((".weight", ".bias", "!")) else full + found.suffix


def to(name: str, **how: Any) -> Rule:
    """The tensor under this name; `order` and `columns` may be functions of the build and the number of rows."""

    def rule(m: Build, found: Found) -> None:
        made = dict(how)
        for key, n in (("order", found.shape[0] if found.shape else 1), ("columns", found.shape[-1])):
            if callable(made.get(key)):
                made[key] = made[key](m, n)
        m.plain(found, place(name, found).removesuffix("!"), **made)

    return rule


def drop(m: Build, found: Found) -> None:
    """Not part of the result."""
    m.dropped.append(found.name)


def expert(name: str) -> Rule:
    """One matrix per expert, together a tensor of all."""

    def rule(m: Build, found: Found) -> None:
        m.experts.setdefault(place(name, found), {})[found.expert] = found

    return rule


def stack_experts(m: Build) -> None:
    """The tensors of all experts, when all matrices are known."""
    for name, parts in m.experts.items():
        missing = next((i for i in range(len(parts)) if i not in parts), None)
        shapes = {p.shape for p in parts.values()}
        if missing is not None or len(shapes) > 1:
            what = f"expert {missing} is missing" if missing is not None else "experts differ in shape"
            raise FormatError(f"{m.config.path.parent}: {what} ({next(iter(parts.values())).name} and others)")
        shape = shapes.pop()
        ordered = [parts[i] for i in range(len(parts))]
        if len(shape) == 1:
            pieces = [TensorRows(p.name, 1, shape[0]) for p in ordered]
            m.add(name, pieces, (shape[0], len(parts)))
        else:
            m.add(name, [TensorRows(p.name, shape[0], shape[1]) for p in ordered], (shape[1], shape[0], len(parts)))


def split(*names: str, at: Callable[[Build, int], Sequence[int]] | None = None) -> Rule:
    """Rows of one matrix (or elements of a vector) for several tensors: equal parts, or these numbers of rows."""

    def rule(m: Build, found: Found) -> None:
        n = found.shape[0]
        sizes = [n // len(names)] * len(names) if at is None else list(at(m, n))
        if sum(sizes) != n:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has {n} rows, not {sum(sizes)}")
        start = 0
        for name, size in zip(names, sizes, strict=True):
            m.part(found, place(name, found), start, start + size)
            start += size

    return rule


def fused_experts(*names: str, transposed: bool = False, interleaved: bool = False) -> Rule:
    """(experts, rows, width) for several tensors: parts of the rows of each expert, or every n-th row.

    `transposed`: (experts, width, rows). Biases (experts, rows) are vectors per expert.
    """

    def rule(m: Build, found: Found) -> None:
        parts = len(names)
        if len(found.shape) == 2:
            for i, name in enumerate(names):
                n = found.shape[1] // parts
                columns = np.arange(i, found.shape[1], parts) if interleaved else np.arange(i * n, (i + 1) * n)
                m.add(place(name, found), (TensorRows(found.name, found.shape[0], n, columns=columns),))
            return
        if len(found.shape) != 3:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has the shape {list(found.shape)}")
        n_expert, inner, outer = found.shape
        blocks = m.packed(found.name) if transposed else None
        n_rows, width = (outer, inner) if transposed else (inner, outer)
        for i, name in enumerate(names):
            n = n_rows // parts
            pick = slice(i, n_rows, parts) if interleaved else slice(i * n, (i + 1) * n)
            pieces: list[Piece] = []
            for e in range(n_expert):
                if blocks is not None:  # packed they are not transposed
                    order = e * n_rows + np.arange(n_rows)[pick]
                    pieces.append(TensorRows(blocks, n, width, 0, order))
                elif transposed:
                    pieces.append(Matrix(found.name, n, width, e * inner, (e + 1) * inner, _turned(pick)))
                else:
                    order = e * inner + np.arange(n_rows)[pick]
                    pieces.append(TensorRows(found.name, n, width, int(order[0]), order if interleaved else None))
            m.add(place(name, found), pieces, (width, n, n_expert))

    return rule


def _turned(pick: slice) -> Callable[[Array], Array]:
    return lambda rows: np.ascontiguousarray(rows.T[pick])


def in_pairs(heads: Order) -> Order:
    """Rows by head, where the two of a rotated pair are half a head apart, in an order in which they are adjacent."""
    return heads.reshape(len(heads), 2, -1).swapaxes(1, 2).reshape(-1)


def rotated_pairs(heads: str = "num_attention_heads", *other: str) -> Callable[[Build, int], Order]:
    """Order of rows in which the two of a rotated pair are adjacent, of rows where they are half a head apart."""

    def order(m: Build, n: int) -> Order:
        n_head = m.config.integer(heads, *other, default=m.config.integer("num_attention_heads"), least=1)
        if n % (2 * n_head):
            raise m.config.fail(heads, f"is {n_head}, which does not fit {n} rows")
        return in_pairs(np.arange(n).reshape(n_head, -1))

    return order


def convert_tensors(m: Build, architecture: Architecture) -> None:
    """Every tensor of the checkpoint gets its place, and those that no tensor is behind are added."""
    place_tensors(m, architecture)
    architecture.finish(m)
    blocks = re.compile(r"blk\.(\d+)\.")
    numbered = sorted(m.tensors.items(), key=lambda item: int(b[1]) if (b := blocks.match(item[0])) else -1)
    m.tensors = dict(numbered)


def place_tensors(m: Build, architecture: Architecture) -> None:
    """Every tensor of the checkpoint gets its place; UnsupportedError for one that has none."""
    for name in m.source.names:
        if architecture.drop and re.search(architecture.drop, name):
            m.dropped.append(name)
            continue
        rule, found = _find(m, architecture, name)
        if not architecture.further and found.block >= m.n_layer:
            m.dropped.append(name)
            continue
        if rule is None:
            raise UnsupportedError(f"{m.config.path.parent}: tensor {name} has no place in architecture {m.arch}")
        if isinstance(rule, str):
            m.plain(found, place(rule, found).removesuffix("!"))
        else:
            rule(m, found)
    stack_experts(m)


def _find(m: Build, architecture: Architecture, name: str) -> tuple[str | Rule | None, Found]:
    short = name
    for prefix in (architecture.strip, "model.", "language_model.", "model."):
        short = short.removeprefix(prefix)
    block, expert_no = -1, -1
    words = short.split(".")
    for i, word in enumerate(words):
        if word.isdecimal():
            if block < 0:
                block, words[i] = int(word), "*"
            else:
                expert_no, words[i] = int(word), "#"
    general = ".".join(words)
    suffix = next((s for s in (".weight", ".bias") if general.endswith(s)), "")
    found = Found(name, m.source.shape(name) or (1,), suffix, block, expert_no)
    rule = architecture.table.get(general)
    if rule is None and suffix:
        rule = architecture.table.get(general.removesuffix(suffix))
    return rule, found
