"""Read a SentencePiece model file (`tokenizer.model`), one protobuf message, without the sentencepiece library.

ModelProto: 1 pieces (1 text, 2 score, 3 type), 2 trainer (3 model type, 40-43 ids of unk, bos, eos, pad), 3 normalizer
(2 compiled character map, 3 dummy prefix, 4 extra white space removed). Types of pieces are those of GGUF.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.errors import FormatError, IkError

_MAX_BYTES = 256 << 20
_WIDTH = {1: 8, 5: 4}


@dataclass(slots=True)
class SpmFile:
    """The parts of the file that a conversion needs."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    unigram: bool = True
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_spm(path: Path) -> SpmFile:
    """Read the file; raise a FormatError unless it is a SentencePiece model."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise FormatError(f"{path}: is too large for a SentencePiece model")
        data = memoryview(path.read_bytes())
    except OSError as problem:
        raise IkError(f"{path}: {problem.strerror or problem}") from None
    model = SpmFile()
    try:
        _read_model(data, model)
    except (ValueError, struct.error, UnicodeDecodeError):
        raise FormatError(f"{path}: is not a SentencePiece model, or it is damaged") from None
    if not model.pieces:
        raise FormatError(f"{path}: is not a SentencePiece model: it has no pieces")
    return model


def _read_model(data: memoryview, model: SpmFile) -> None:
    for number, value in _fields(data):
        if number == 1:
            model.pieces.append(_piece(_message(value)))
        elif number == 2:
            for n, v in _fields(_message(value)):
                if n == 3:
                    model.unigram = _integer(v) == 1
                elif n in (40, 41, 42, 43):
                    model.ids[("unk", "bos", "eos", "pad")[n - 40]] = _signed(_integer(v))
        elif number == 3:
            for n, v in _fields(_message(value)):
                if n == 2:
                    model.charsmap = bytes(_message(v))
                elif n == 3:
                    model.add_dummy_prefix = bool(_integer(v))
                elif n == 4:
                    model.remove_extra_whitespaces = bool(_integer(v))


def _piece(data: memoryview) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1:
            text = bytes(_message(value)).decode("utf-8")
        elif number == 2:
            score = float(struct.unpack("<f", _message(value))[0])
        elif number == 3:
            kind = _integer(value)
    if not 1 <= kind <= 6 or score != score:
        raise ValueError
    return text, score, kind


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the numbers and values of a message's fields: integers, or bytes for all other kinds."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = _WIDTH.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError
    return value


def _integer(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
