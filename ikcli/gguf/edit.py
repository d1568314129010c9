"""Change the metadata of a GGUF file: in place if the header still fits, else in a new file.

Tensor data begins at the next multiple of the alignment after the header, and readers find it by nothing else. So the
header may grow or shrink only within that padding.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import FLOAT_TYPES, INTEGER_TYPES, SCALAR_CODES, GGUFValueType
from ikcli.gguf.reader import GGUFFile, open_gguf, read_part
from ikcli.gguf.split import copy_tensors, refuse_inputs, tensor_specs
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import SPLIT_KEYS, GGUFWriter, header_bytes
from ikcli.suggest import near_names
from ikcli.text_files import read_text

V = GGUFValueType
_TYPES = {t.name.lower(): t for t in GGUFValueType if t != V.ARRAY}
_TYPES |= {re.sub("^(u?int|float)", lambda m: {"uint": "u", "int": "i", "float": "f"}[m[1]], n): t
           for n, t in _TYPES.items()}  # fmt: skip
_TYPES["str"] = V.STRING
TYPE_NAMES = ("str", "bool", "int", "float", "u8 ... u64", "i8 ... i64", "f32", "f64")
_ALIGNMENT = "general.alignment"
_PROTECTED = frozenset({"general.architecture", _ALIGNMENT, "tokenizer.ggml.tokens", "general.type"})
_SHAPES = re.compile(
    r"(block_count|vocab_size|\w*embedding_length\w*|\w*feed_forward_length|leading_dense_block_count"
    r"|nextn_predict_layers"
    r"|expert_(shared_)?count|attention\.(head_count(_kv)?|(key|value)_length\w*|[qk]v?_lora_rank)|ssm\.\w+)"
)


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one key; None means absent before or after."""

    key: str
    old: Typed | None
    new: Typed | None


@dataclass(frozen=True, slots=True)
class Edited:
    """The files that were written; `in_place` if only headers changed."""

    paths: tuple[Path, ...]
    changes: tuple[Change, ...]
    in_place: bool


def plan_changes(
    file: GGUFFile, sets: Sequence[str] = (), set_files: Sequence[str] = (), deletes: Sequence[str] = (),
    force: bool = False,
) -> list[Change]:  # fmt: skip
    """Parse `--set`, `--set-file` and `--delete`; raise a UsageError that quotes the faulty text."""
    old = file.typed_metadata()
    new: dict[str, Typed | None] = {}
    for option, key, value in [
        *(("--set", *_parse(text, old)) for text in sets),
        *(("--set-file", *_from_file(text, old)) for text in set_files),
        *(("--delete", key.strip(), None) for key in deletes),
    ]:
        if not key:
            raise UsageError(f"{option}: the key is empty")
        if key in new:
            raise UsageError(f"{option}: {key} is named twice")
        if value is None and key not in old:
            near = near_names(key, old)
            raise UsageError(
                f"--delete: {file.paths[0]} has no key {key}" + (f"; near: {', '.join(near)}" * bool(near))
            )
        new[key] = value
    for key in new:
        _check_protected(file, key, force)
    return [Change(key, old.get(key), value) for key, value in new.items()]


def _check_protected(file: GGUFFile, key: str, force: bool) -> None:
    if key in SPLIT_KEYS:
        raise UsageError(f"{key} belongs to the division into parts; ik gguf-split changes that")
    arch = str(file.get("general.architecture", ""))
    shapes = key.startswith(f"{arch}.") and _SHAPES.fullmatch(key.removeprefix(f"{arch}."))
    if (key in _PROTECTED or shapes) and not force:
        raise UsageError(f"{key} says how tensors are laid out or read; --force changes it nevertheless")


def _parse(text: str, old: dict[str, Typed]) -> tuple[str, Typed]:
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    key, kind = key.strip(), kind.strip().lower()
    if not (key and equals and colon):
        raise UsageError(f'--set: "{text}" is not of the form KEY=TYPE:VALUE, for example: general.name=str:mine')
    item, is_array = kind.removesuffix("[]"), kind.endswith("[]")
    if item not in (*_TYPES, "int", "float"):
        raise UsageError(f'--set: "{text}" has the type {kind}; use {", ".join(TYPE_NAMES)}, or one of them with []')
    before = old.get(key)
    known = before.item_type if before is not None and is_array else before.type if before is not None else None
    try:
        items = json.loads(value) if is_array else [value]
        if not isinstance(items, list):
            raise ValueError("is not a JSON list")
        type = _resolve(item, known, items)
        values = [_value(v, type) for v in items]
    except ValueError as problem:
        raise UsageError(f'--set: "{text}": the value {problem}') from None
    if not is_array:
        return key, Typed(values[0], type)
    packed = values if type == V.STRING else np.array(values, SCALAR_CODES[type][0])
    return key, Typed(packed, V.ARRAY, type)


def _resolve(name: str, known: GGUFValueType | None, items: Sequence[Any]) -> GGUFValueType:
    """Resolve `int` and `float` to the present type of the key, else to the usual type that holds the values."""
    if name == "int":
        if known in INTEGER_TYPES:
            assert known is not None
            return known
        numbers = [_int(v) for v in items]
        if all(0 <= n < 2**32 for n in numbers):
            return V.UINT32
        if all(-(2**31) <= n < 2**31 for n in numbers):
            return V.INT32
        return V.UINT64 if min(numbers) >= 0 else V.INT64
    if name == "float":
        return known if known in FLOAT_TYPES and known is not None else V.FLOAT32
    return _TYPES[name]


def _int(value: Any) -> int:
    try:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise ValueError(f"{value} is not a whole number")


def _value(value: Any, type: GGUFValueType) -> Any:
    """Convert a text or JSON value to the type."""
    if type == V.STRING:
        if not isinstance(value, str):
            raise ValueError(f"{value} is not a text")
        return value
    if type == V.BOOL:
        found = value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
        if found is None:
            raise ValueError(f"{value} is neither true nor false")
        return found
    if type in INTEGER_TYPES:
        number, limits = _int(value), np.iinfo(SCALAR_CODES[type][0])
        if not int(limits.min) <= number <= int(limits.max):
            raise ValueError(f"{number} does not fit {type.name.lower()}")
        return number
    try:
        real = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value} is not a number") from None
    with np.errstate(over="ignore"):
        single = float(np.float32(real)) if type == V.FLOAT32 else real
    if math.isfinite(real) and not math.isfinite(single):
        raise ValueError(f"{value} does not fit {type.name.lower()}")
    return single


def _from_file(text: str, old: dict[str, Typed]) -> tuple[str, Typed]:
    key, equals, name = (part.strip() for part in text.partition("="))
    name = name.removeprefix("@")
    if not (key and equals and name):
        raise UsageError(f'--set-file: "{text}" is not KEY=@FILE, for example: tokenizer.chat_template=@chat.jinja')
    before = old.get(key)
    if before is not None and before.type != V.STRING:
        raise UsageError(f"--set-file: {key} is of type {before.type.name.lower()}; a file can only be set as a text")
    return key, Typed(read_text(Path(name), "--set-file"), V.STRING)


def changed_metadata(metadata: dict[str, Typed], changes: Sequence[Change]) -> dict[str, Typed]:
    """Return the metadata after the changes; remaining keys keep their order."""
    out = dict(metadata)
    for change in changes:
        if change.new is None:
            del out[change.key]
        else:
            out[change.key] = change.new
    return out


def edit_in_place(path: str | Path, changes: Sequence[Change]) -> Edited:
    """Write a new header over the old one, in the first part of a split model.

    Raise an UnsupportedError if it does not fit exactly."""
    part = read_part(path)
    name = part.paths[0]
    if any(change.key == _ALIGNMENT for change in changes):
        raise UnsupportedError(f"another {_ALIGNMENT} moves all tensors: write a new file with -o")
    start, old = part.data_start, part.typed_metadata()
    tensors = [(t.name, t.shape, t.type, t.offset - start) for t in part.tensors.values()]
    before = header_bytes(old, tensors, part.version)
    with name.open("rb") as file:
        if file.read(len(before)) != before:
            raise UnsupportedError(f"{name}: the header is written in an unusual way: write a new file with -o")
    header = header_bytes(changed_metadata(old, changes), tensors, part.version)
    room = -(-len(header) // part.alignment) * part.alignment
    if room != start and tensors:
        more = "more" if room > start else "less"
        raise UnsupportedError(
            f"{name}: the header would need {abs(room - start)} bytes {more} than lie before the tensors: "
            "write a new file with -o"
        )
    header += bytes(room - len(header))
    try:
        with name.open("r+b") as out:
            _overwrite(out, header)
            if not tensors:
                out.truncate(room)
            out.flush()
            os.fsync(out.fileno())
    except OSError as problem:
        raise FormatError(f"{name}: cannot be written ({problem.strerror or problem})") from None
    return Edited((name,), tuple(changes), True)


def _overwrite(out: Any, header: bytes) -> None:
    """Write only the bytes from the first change to the last."""
    old = out.read(len(header))
    differ = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(header, np.uint8)[: len(old)])
    if len(old) < len(header):
        first, last = int(differ[0]) if len(differ) else len(old), len(header)
    elif not len(differ):
        return
    else:
        first, last = int(differ[0]), int(differ[-1]) + 1
    out.seek(first)
    out.write(header[first:last])


def edit_into(
    path: str | Path,
    output: str | Path,
    changes: Sequence[Change],
    advance: Callable[[float], None] = lambda n_bytes: None,
) -> Edited:
    """Copy the model with changed metadata; a split model into the same number of parts, named after `output`."""
    file, out = open_gguf(path), Path(output)
    metadata = changed_metadata(file.typed_metadata(), changes)
    alignment = metadata.get(_ALIGNMENT)
    counts = [0] * len(file.paths)
    for t in file.tensors.values():
        counts[t.file_index] += 1
    keys = {key: value for key, value in metadata.items() if len(counts) == 1 or key not in SPLIT_KEYS}
    to = alignment.value if alignment is not None else file.alignment
    if not isinstance(to, int) or to <= 0 or to & (to - 1):
        raise UsageError(f"{_ALIGNMENT} must be a power of two")
    with GGUFWriter(out, keys, tensor_specs(file), to, file.version, counts) as writer:
        refuse_inputs(file, writer.paths)
        copy_tensors(file, writer, advance)
    return Edited(tuple(writer.paths), tuple(changes), False)
