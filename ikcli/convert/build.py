"""A model under conversion: its GGUF keys, its new tensors, and the rules that make them from those of the checkpoint.

An architecture is a record. Names of tensors come from the gguf package (`names.py`); the record's table holds what
differs from it. A key of the table is a tensor name in general form, without `.weight`/`.bias` or with it (which takes
precedence); `*` is the number of the block, `#` that of the expert. A value is a GGUF name, or a rule: a function that
receives the tensor and adds the new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ikcli.convert.config import Config
from ikcli.convert.heads import NEXT_TOKENS, count_heads, usual_name
from ikcli.convert.kept_blocks import kept
from ikcli.convert.names import general_name, gguf_names
from ikcli.convert.pieces import (
    KEPT,
    TYPES_OF,
    Constant,
    Floats,
    Matrix,
    NewRows,
    Numbers,
    Order,
    Piece,
    TensorRows,
    Value,
    n_rows_of,
)
from ikcli.convert.quantized import Dequantized
from ikcli.convert.source import Array, CheckpointSource
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.heads import Heads

_F32_NAMES = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight")
_F32_PARTS = ("_norm.weight", "ssm_conv1d", "shortconv.conv.", "indexer.q_proj.", "indexer.k_proj.",
              "_compressor_ape.", "hc_attn_fn.", "hc_ffn_fn.", "output_hc_fn.", "mhc_phi.", "attn_qa_conv.",
              "attn_compresskv_conv.", "attn_o_conv.", "altup_predict_coef.", "altup_correct_coef.")  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of the checkpoint that a rule applies to."""

    name: str
    shape: tuple[int, ...]
    suffix: str  # .weight, .bias or nothing
    block: int
    expert: int

    def matrix(self) -> tuple[int, int]:
        """Return (rows, width), or raise a FormatError unless it is a matrix."""
        if len(self.shape) != 2:
            raise FormatError(f"tensor {self.name} has the shape {list(self.shape)}, not that of a matrix")
        return self.shape[0], self.shape[1]


Rule = Callable[["Build", Found], None]
Table = dict[str, "str | Rule"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of some classes become a GGUF architecture.

    `keys` writes the metadata, `table` holds the tensors that gguf does not place, `finish` adds tensors that have no
    counterpart in the checkpoint. Tensors that match `drop` are left out. `harmless` lists keys of config.json that do
    not affect the result.
    """

    name: str
    classes: tuple[str, ...]
    keys: Callable[[Build], None]
    table: Table = field(default_factory=dict)
    finish: Callable[[Build], None] = lambda m: None
    drop: str = ""
    harmless: frozenset[str] = frozenset()
    strip: str = ""  # a prefix of names, beside `model.`
    further: bool = True  # False: blocks after the last one, which predict further tokens, are left out
    names: str = ""  # the architecture of gguf whose tensor names it shares, where gguf does not have it or lacks names
    needs_target: bool = False  # a head that drafts for another checkpoint, which has its vocabulary


@dataclass(slots=True)
class Build:
    """Keys and tensors made so far."""

    config: Config
    source: CheckpointSource
    arch: str
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, NewRows] = field(default_factory=dict)
    experts: dict[str, dict[int, Found]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    keep: frozenset[str] = frozenset()  # types of blocks that are kept
    numbers: dict[str, Numbers] = field(default_factory=dict)  # factors beside kept blocks
    heads: Heads = Heads.KEPT
    n_further: int = 0  # layers for further tokens, which follow the model's own
    notes: list[str] = field(default_factory=list)  # reported to the user
    target: Config | None = None  # the model that a head drafts for

    @property
    def n_layer(self) -> int:
        """Return the number of layers, without those for further tokens."""
        return self.config.integer(
            "num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers", least=1
        )

    def count_heads(self) -> None:
        """Count the layers for further tokens that the file gets."""
        if self.heads is not Heads.DROPPED:
            self.n_further = count_heads(self.source.names, self.n_layer)

    def key(self, name: str, value: Any) -> None:
        """Write a key of the architecture, unless the value is None."""
        if value is not None:
            self.metadata[f"{self.arch}.{name}"] = value

    def has(self, pattern: str) -> bool:
        """Return whether a tensor of the checkpoint matches."""
        return any(re.search(pattern, name) for name in self.source.names)

    def add(self, name: str, pieces: Sequence[Piece], shape: tuple[int, ...] = (), value: Value | None = None) -> None:
        """Add a tensor of these rows; `shape` in GGUF order if it is not (row length, rows)."""
        if name in self.tensors:
            raise FormatError(f"{self.config.path.parent}: two tensors become {name}")
        shape = shape or (pieces[0].width, sum(p.n_rows for p in pieces))
        type = self._type(name, shape, pieces, value)
        if self.keep and type != GGMLType.F32 and isinstance(self.source, Dequantized):
            found = kept(self.source, name, pieces, shape, self.keep)
            if found is not None:
                pieces, type = found.pieces, KEPT[found.type]
                self.numbers |= found.numbers
        self.tensors[name] = NewRows(name, shape, type, pieces, value)

    def packed(self, name: str) -> str | None:
        """Return the name under which a tensor is read as MXFP4 blocks, or None if it has none or they are not kept."""
        found = isinstance(self.source, Dequantized) and self.source.packed(name, self.keep & {"MXFP4"})
        return found or None

    def add_numbers(self) -> None:
        """Add the factors of kept blocks, times those that the model itself has under the same name."""
        for name, numbers in self.numbers.items():
            own = self.tensors.get(name)
            times = None if own is None else own.pieces[0]
            self.tensors[name] = NewRows(name, (numbers.width,), GGMLType.F32, (replace(numbers, times=times),))

    def constant(self, name: str, values: Floats | Order) -> None:
        """Add a tensor of computed values: float32, or int64."""
        type = GGMLType.I64 if values.dtype == np.int64 else GGMLType.F32
        self.tensors[name] = NewRows(name, (values.size,), type, (Constant(values),))

    def _type(self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece], value: Value | None) -> GGMLType:
        kinds, mixed = set(), self._mixed()
        for piece in pieces:
            dtype = "F32" if isinstance(piece, Constant | Numbers) else self.source.dtype(piece.name)
            if dtype not in TYPES_OF:
                where = f"{self.config.path.parent}: tensor {getattr(piece, 'name', name)}"
                raise UnsupportedError(f"{where} is of type {dtype}, and config.json does not say how to read it")
            made = mixed is not None and mixed.made(getattr(piece, "name", ""))
            kinds.add(GGMLType.BF16 if made else TYPES_OF[dtype])
        computed = value is not None or any(isinstance(p, TensorRows) and p.factor != 1.0 for p in pieces)
        kept = len(shape) < 2 or computed or not name.endswith("weight")
        if kept or name.endswith(_F32_NAMES) or any(part in name for part in _F32_PARTS) or len(kinds) > 1:
            return GGMLType.F32
        return kinds.pop()

    def _mixed(self) -> Dequantized | None:
        """Return the source if it has weights that are kept as blocks; others, if dequantized, become BF16 then."""
        found = self.source
        return found if self.keep and isinstance(found, Dequantized) and found.has_packed(self.keep) else None

    def plain(self, found: Found, name: str, shape: tuple[int, ...] | None = None, **how: Any) -> None:
        """Add a tensor as it is, or with `order` of its rows, `columns` within rows, or `value` applied to its numbers.

        A vector counts as one row.
        """
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
        """Add rows [first, last) of a matrix, or elements of a vector."""
        if len(found.shape) == 1:
            self.plain(found, name, (last - first,), order=np.arange(first, last))
        else:
            self.add(name, (TensorRows(found.name, last - first, found.shape[-1], first),))


def place(name: str, found: Found) -> str:
    """Return a GGUF name of the table with the block number and the suffix of the tensor."""
    full = name.replace("*", str(found.block))
    return full if full.endswith((".weight", ".bias", "!")) else full + found.suffix


def to(name: str, **how: Any) -> Rule:
    """Return a rule that renames; `order` and `columns` may be functions of the build and the number of rows."""

    def rule(m: Build, found: Found) -> None:
        made = dict(how)
        for key, n in (("order", found.shape[0] if found.shape else 1), ("columns", found.shape[-1])):
            if callable(made.get(key)):
                made[key] = made[key](m, n)
        m.plain(found, place(name, found).removesuffix("!"), **made)

    return rule


def scaled(name: str, factors: Callable[[Build], Sequence[tuple[int, float]] | float]) -> Rule:
    """Return a rule that renames and multiplies by what the function makes: a factor, or (rows, factor) per part."""

    def rule(m: Build, found: Found) -> None:
        n, width = found.matrix()
        start, pieces, parts = 0, [], factors(m)
        for rows, factor in parts if not isinstance(parts, float) else [(n, parts)]:
            pieces.append(TensorRows(found.name, rows, width, start, factor=factor))
            start += rows
        if start != n:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has {n} rows, not {start}")
        m.add(place(name, found), pieces)

    return rule


def drop(m: Build, found: Found) -> None:
    """Leave the tensor out."""
    m.dropped.append(found.name)


def expert(name: str) -> Rule:
    """Return a rule that collects the matrix of one expert for a tensor of all."""

    def rule(m: Build, found: Found) -> None:
        m.experts.setdefault(place(name, found), {})[found.expert] = found

    return rule


def stack_experts(m: Build) -> None:
    """Add the tensors of experts, once the matrices of all are known."""
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
    """Return a rule that splits rows (or elements of a vector) into equal parts, or parts of `at` rows."""

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
    """Return a rule for (experts, rows, width): each name gets a part of the rows of every expert.

    The parts follow each other, or alternate row by row if `interleaved`. `transposed`: (experts, width, rows).
    Biases have the shape (experts, rows).
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
                if blocks is not None:  # packed blocks are not transposed
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


def plus_one(x: Floats) -> Floats:
    """Return the weights of norms that are stored as differences from 1."""
    return x + np.float32(1)


def minus_exp(x: Floats) -> Floats:
    """Return the decay of heads, of which the checkpoint has the logarithm."""
    return -np.exp(x)


def in_pairs(heads: Order) -> Order:
    """Return rows by head so that rotated pairs, half a head apart in `heads`, become adjacent."""
    return heads.reshape(len(heads), 2, -1).swapaxes(1, 2).reshape(-1)


def rotated_pairs(heads: str = "num_attention_heads", *other: str) -> Callable[[Build, int], Order]:
    """Return an order of rows that makes rotated pairs adjacent; checkpoints have them half a head apart."""

    def order(m: Build, n: int) -> Order:
        n_head = m.config.integer(heads, *other, default=m.config.integer("num_attention_heads"), least=1)
        if n % (2 * n_head):
            raise m.config.fail(heads, f"is {n_head}, which does not fit {n} rows")
        return in_pairs(np.arange(n).reshape(n_head, -1))

    return order


PAIRS: Table = {
    "layers.*.self_attn.q_proj": to("blk.*.attn_q", order=rotated_pairs()),
    "layers.*.self_attn.k_proj": to("blk.*.attn_k", order=rotated_pairs("num_key_value_heads")),
}
"""Rows of queries and keys, in the order of a rotation of adjacent columns."""

_EVERYWHERE: Table = {
    f"layers.*.{part}.experts.{name}": fused_experts(*places)
    for part in ("mlp", "block_sparse_moe")
    for name, places in (
        ("gate_up_proj", ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")),
        ("down_proj", ("blk.*.ffn_down_exps.weight",)),
    )
}
"""Experts of all architectures that are stored as tensors of three dimensions."""


def convert_tensors(m: Build, architecture: Architecture) -> None:
    """Place all tensors of the checkpoint, add computed ones, and sort them by block."""
    place_tensors(m, architecture)
    architecture.finish(m)
    m.add_numbers()
    blocks = {name: int(b[1]) if (b := _BLOCK.match(name)) else -1 for name in m.tensors}
    if m.heads is Heads.ALONE:
        if not m.n_further:
            raise UnsupportedError(
                f"{m.config.path.parent}: --mtp: the checkpoint has no layers that predict further tokens (MTP)"
                f"{'' if architecture.further else f', or none that {m.arch} files can hold'}; convert it without --mtp"
            )
        m.dropped += [name for name, il in blocks.items() if 0 <= il < m.n_layer]
        m.tensors = {name: t for name, t in m.tensors.items() if not 0 <= blocks[name] < m.n_layer}
    m.tensors = dict(sorted(m.tensors.items(), key=lambda item: blocks[item[0]]))


def place_tensors(m: Build, architecture: Architecture) -> None:
    """Place all tensors of the checkpoint, or raise an UnsupportedError for one without a place."""
    for name in m.source.names:
        if name.endswith(".inv_freq") or (architecture.drop and re.search(architecture.drop, name)):
            m.dropped.append(name)
            continue
        if "/" in name:
            place_dense(m, name)
            continue
        rule, found = _find(m, architecture, name)
        if found.block >= m.n_layer and (not architecture.further or m.heads is Heads.DROPPED):
            m.dropped.append(name)
            continue
        if rule is None:
            raise UnsupportedError(f"{m.config.path.parent}: tensor {name} has no place in architecture {m.arch}")
        if isinstance(rule, str):
            m.plain(found, place(rule, found).removesuffix("!"))
        else:
            rule(m, found)
    stack_experts(m)


def place_dense(m: Build, name: str) -> None:
    """Place a tensor of a sentence-transformers module: the dense layers after the pooling are `dense_2`, `dense_3`."""
    folders = sorted({n.split("/")[0] for n in m.source.names if "/" in n})
    folder, bare = name.split("/")
    number = folders.index(folder) + 2
    shape = m.source.shape(name)
    if bare not in ("linear.weight", "linear.bias") or number > 3:
        raise UnsupportedError(f"{m.config.path.parent}: tensor {name} has no place; known are one or two dense layers")
    if bare == "linear.weight":
        m.key(f"dense_{number}_feat_in", shape[1])
        m.key(f"dense_{number}_feat_out", shape[0])
    m.plain(Found(name, shape, "", -1, -1), f"dense_{number}.{bare.removeprefix('linear.')}")


def _find(m: Build, architecture: Architecture, name: str) -> tuple[str | Rule | None, Found]:
    """Return the rule for a tensor: of the architecture, of all architectures, or the name that gguf has for it."""
    general, block, expert_no = general_name(usual_name(name, m.n_layer), architecture.strip)
    suffix = next((s for s in (".weight", ".bias") if general.endswith(s)), "")
    bare = general.removesuffix(suffix)
    found = Found(name, m.source.shape(name) or (1,), suffix, block, expert_no)
    for table in (architecture.table, _EVERYWHERE, NEXT_TOKENS if block >= m.n_layer else {}):
        rule = table.get(general) or table.get(bare)
        if rule is not None:
            return rule, found
    known = gguf_names(architecture.names or architecture.name, architecture.strip)
    place = known.get(bare.replace(".#", ""))
    if place is None:
        return None, found
    if expert_no >= 0:
        return expert(place), found
    return place if suffix else f"{place}.weight", found
