"""The reader of all text files that people write: settings, rules, keys, prompts, templates, and texts to measure.

Editors and shells save the same text in several ways. A byte order mark is dropped, UTF-16 with such a mark (as
PowerShell's `>` writes it) is decoded, and all line ends become line feeds.
"""

from __future__ import annotations

import codecs
import importlib
import io
from pathlib import Path

from ikcli.errors import FormatError, IkError, UsageError
from ikcli.log import warn

LARGEST = 1 << 30
"""Bytes of a file that people write; a tokenizer has tens of millions."""
_LARGEST_TEXT = 8 << 30
_PROBE = 1 << 16

_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_UTF32 = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_PACKED = {b"\x1f\x8b": ("gzip", "gzip"), b"BZh": ("bzip2", "bz2"), b"\xfd7zXZ\0": ("xz", "lzma")}
"""First bytes of compressed files that are unpacked: the name, and the module that does it, imported when needed."""
_ELSEWHERE = {
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it with zstd -d"),
    b"\x04\x22\x4d\x18": ("compressed with lz4", "unpack it with lz4 -d"),
    b"PK\x03\x04": ("a zip archive", "unpack it and name the text in it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it and name the text in it"),
    b"PAR1": ("a Parquet table", "write its texts into a text file"),
    b"GGUF": ("a model or matrix in GGUF", "name a text file"),
    b"%PDF-": ("a PDF document", "save its text as a text file"),
}


def read_text(path: Path, what: str = "", error: type[IkError] = UsageError, otherwise: str = "not a text file") -> str:
    """Read the text of a file; if that fails, raise `error` with a message that begins with `what` it is for."""
    start = f"{what}: " if what else ""
    try:
        return decode(_read(path, LARGEST))
    except OSError as problem:
        raise error(f"{start}cannot read {path}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise error(f"{start}{path} is {otherwise}: {problem}") from None


def read_bytes(path: Path, hint: str = "") -> bytes:
    """Read the bytes of a text to measure or to answer, unpacking a compressed one; raise IkError for other kinds.

    `hint` ends the message about a file that cannot be read.
    """
    try:
        return _unpacked(path, _read(path, _LARGEST_TEXT))
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise IkError(f"cannot read {path}: {reason}{hint}") from None


def read_measured(path: Path, hint: str = "") -> bytes:
    """Read as `read_bytes` does, in UTF-8 without a byte order mark, with line feeds as line ends.

    Bytes that are not UTF-8 are kept, with a warning.
    """
    return as_measured(read_bytes(path, hint), path)


def as_measured(data: bytes, path: Path | str) -> bytes:
    """Treat bytes that were read elsewhere as `read_measured` treats those of a file; messages call them `path`."""
    if mark := next((mark for mark in (*_UTF32, *_UTF16) if data.startswith(mark)), None):
        try:
            data = data.decode((_UTF32 | _UTF16)[mark]).encode("utf-8")
        except UnicodeError:
            raise FormatError(f"{path}: begins like UTF-16 or UTF-32, but is not; save it as UTF-8") from None
    data = data.removeprefix(codecs.BOM_UTF8)
    warn_of_binary(path, data)
    if b"\0" in data:
        return data
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def decode(data: bytes) -> str:
    """Decode the bytes of a text file; raise ValueError that names their actual kind otherwise."""
    coding = next((c for mark, c in (_UTF32 | _UTF16).items() if data.startswith(mark)), "")
    kind = next((kind for magic, kind in _kinds().items() if data.startswith(magic)), "")
    if kind:
        raise ValueError(f"it is {kind}")
    try:
        text = data.decode(coding) if coding else data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as problem:
        name = "UTF-16 or UTF-32, as which it begins," if coding else "UTF-8 text"
        raise ValueError(f"it is not {name} (byte {problem.start}); save it as UTF-8") from None
    if "\0" in text:
        raise ValueError("it has NUL bytes, like UTF-16 without a byte order mark; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _kinds() -> dict[bytes, str]:
    packed = {magic: f"compressed with {name}" for magic, (name, _) in _PACKED.items()}
    return packed | {magic: kind for magic, (kind, _) in _ELSEWHERE.items()}


def _read(path: Path, largest: int) -> bytes:
    """Read the bytes of a file, or of a pipe."""
    with path.open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it is larger than {largest >> 30} GiB, too large for a file of this kind")
    return data


def _unpacked(path: Path, data: bytes) -> bytes:
    """Unpack a compressed file, recognized by its first bytes; raise IkError for kinds that cannot be read."""
    for magic, (name, module) in _PACKED.items():
        if data.startswith(magic):
            try:
                with importlib.import_module(module).open(io.BytesIO(data)) as stream:
                    data = stream.read(_LARGEST_TEXT + 1)
            except Exception as problem:  # each of these modules raises its own errors for damaged files
                raise FormatError(f"{path}: begins like a file of {name}, but cannot be unpacked: {problem}") from None
            if len(data) > _LARGEST_TEXT:
                raise FormatError(f"{path}: unpacks to more than {_LARGEST_TEXT >> 30} GiB; split the text")
            break
    for magic, (kind, way_out) in _ELSEWHERE.items():
        if data.startswith(magic):
            raise FormatError(f"{path} is {kind}, not a text; {way_out}")
    if data[257:262] == b"ustar":
        raise FormatError(f"{path} is a tar archive, not a text; unpack it and name the text in it")
    return data


def is_text(path: Path) -> bool:
    """Return whether a file begins like a text to measure: UTF-8 without NUL, a byte order mark, or compressed."""
    with path.open("rb") as file:
        head = file.read(_PROBE)
    if head.startswith((*_PACKED, *_UTF16, *_UTF32)):
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def warn_of_binary(path: Path | str, data: bytes) -> None:
    """Warn that a file is hardly a text, if its bytes are used unchanged."""
    if b"\0" in data:
        warn(f"{path} has NUL bytes and is probably not a text; it is read unchanged")
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as problem:
        warn(f"{path} is not UTF-8 text (byte {problem.start}); the bytes that are not are read as they are")
