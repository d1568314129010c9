"""Declare the parameters of CPU kernels by name: lowering fills a record, the kernel reads it.

    class ScaleParams(Params):      low.emit(key, node.rows, ScaleParams(x=low.out(op.x), factor=op.factor))
        x: Address
        factor: F32                 @kernel(ScaleParams)
                                    def scale(params, ith, nth): ... params.x ... params.factor ...

In memory a record is a sequence of int64 words in the order of its fields, those of its base classes first. A field
that is a record takes as many words as that record. This module needs no Numba; `kernels/records.py` adds the kernels'
side.
"""

from __future__ import annotations

import struct
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, dataclass_transform

if TYPE_CHECKING:
    from ikcli.backends.lowering import Ref

# What fields are declared as: the annotation says how a word is stored and read.
Address: TypeAlias = "int | Ref"  # 0: absent
F32: TypeAlias = float
F64: TypeAlias = float
Words: TypeAlias = "tuple[int, ...]"  # any number of them, as the last field; the kernel reads their address
Word: TypeAlias = "int | Ref"

_KINDS = {"int": "i64", "Address": "i64", "F32": "f32", "F64": "f64", "Words": "words"}
_RECORDS: dict[str, type[Record]] = {}


class ParamField(NamedTuple):
    """A field: its first word, and how it is stored: a number, `words`, or one or several records."""

    at: int
    kind: str | type[Record]


@dataclass_transform(kw_only_default=True)
class Record:
    """Words with names. Every field is given by name; creating the record refuses an unknown one."""

    fields: ClassVar[dict[str, ParamField]] = {}
    n_words: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls.fields = dict(cls.fields)
        for name, text in get_annotations(cls).items():
            if text.startswith("ClassVar"):
                continue
            kinds = [_kind(cls, name, part) for part in text.removeprefix("tuple[").removesuffix("]").split(", ")]
            cls.fields[name] = ParamField(cls.n_words, kinds[0])
            cls.n_words += sum(1 if isinstance(kind, str) else kind.n_words for kind in kinds)
        _RECORDS[cls.__name__] = cls

    def __init__(self, **values: Any) -> None:
        given = {name: field.kind for name, field in self.fields.items() if name not in HEAD}
        if wrong := sorted(values.keys() ^ given.keys()):
            what = "has no parameter" if wrong[0] in values else "lacks the parameter"
            raise TypeError(f"{type(self).__name__} {what} {wrong[0]!r}; it has {', '.join(given)}")
        self.words: list[Word] = []
        for name, kind in given.items():
            if kind == "i64":
                self.words.append(values[name])
            else:
                self.words += _stored(values[name], kind)


HEAD = {"state": ParamField(0, "i64"), "row_count": ParamField(1, "i64"), "row_factor": ParamField(2, "i64")}


class Params(Record):
    """Parameters of a kernel.

    The words before them are filled for all kernels: the address of the state block, the index of its word that counts
    the rows, and the factor on that count.
    """

    fields: ClassVar[dict[str, ParamField]] = HEAD
    n_words: ClassVar[int] = len(HEAD)


def _kind(cls: type[Record], name: str, text: str) -> str | type[Record]:
    kind = _KINDS.get(text) or _RECORDS.get(text)
    if kind is None:
        raise TypeError(
            f"{cls.__name__}.{name} is declared as {text}, which is none of {', '.join(_KINDS)} or a record"
        )
    return kind


def _stored(value: Any, kind: str | type[Record]) -> list[Word]:
    if kind == "words":
        return list(value)
    if isinstance(kind, str):
        return [f32_bits(value) if kind == "f32" else f64_bits(value) if kind == "f64" else value]
    records = value if isinstance(value, tuple) else (value,)
    return [word for record in records for word in record.words]


def f32_bits(x: float) -> int:
    """Return a float32 as the low half of a word."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits


def f64_bits(x: float) -> int:
    """Return a float64 as a word."""
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits
