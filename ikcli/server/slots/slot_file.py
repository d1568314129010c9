"""Files that hold the cache of one slot: tokens and cache rows, for `/slots/N?action=save|restore`.

Layout, little-endian: magic `ik-slot\n`, u32 version, u32 length of the header, the header (JSON: model fingerprint,
cache layout, number of tokens and first position of windows, of the sequence and of every checkpoint), int32 tokens,
the rows of every cache tensor in the order of `Sequences.layout`, for every checkpoint the rows of windows and the
states of the sequence there, and the SHA-256 of everything before it. A file is written under a temporary name and
renamed, so it is either complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.engine.run.control_vectors import VectorUse
from ikcli.engine.run.saved_sequence import Checkpoint, SavedSequence
from ikcli.engine.run.session import Session
from ikcli.files import written_whole
from ikcli.server.slots.states import EngineError

MAGIC, VERSION = b"ik-slot\n", 1
_HEAD = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_MOST_HEADER = 1 << 24
_SAMPLE = 256  # bytes of every tensor that the fingerprint covers

Tokens = npt.NDArray[np.int32]
Part = bytes | npt.NDArray[np.uint8]


def fingerprint(session: Session) -> str:
    """Return a fingerprint of a model: its tensors' names, types, shapes and first bytes, and those of its adapters."""
    digest = hashlib.sha256()
    adapters = session.model.adapters
    for file in (session.model.file, *(a.file for a in adapters.adapters)):
        for name, t in file.tensors.items():
            digest.update(f"{name} {int(t.type)} {tuple(t.shape)}\n".encode())
            digest.update(file.data(name).reshape(-1)[:_SAMPLE].tobytes())
    return digest.hexdigest()


def about(session: Session) -> dict[str, Any]:
    """Return what cached rows belong to: model, layout, and the settings beside it that change what is cached."""
    config = session.config
    settings = hashlib.sha256(repr((config.rope, config.override_kv, config.ser)).encode()).hexdigest()[:16]
    return {"model": fingerprint(session), "layout": session.sequences.layout(), "settings": settings}


def save(session: Session, seq: int, tokens: Tokens, path: Path, added: Added = NOTHING) -> int:
    """Write a sequence whose cache holds these tokens; return the size of the file.

    Raise EngineError 500 if that fails; then no file exists.
    """
    return _write(_encode(session, tokens, session.sequences.save(seq, len(tokens)), added), path)


def _encode(session: Session, tokens: Tokens, saved: SavedSequence, added: Added) -> list[Part]:
    """Return the content of a file."""
    about: dict[str, Any] = {"model": fingerprint(session), "layout": session.sequences.layout()}
    about["n_tokens"] = len(tokens)
    if added != NOTHING:
        about["added"] = (added.scales, added.vectors)
    if not session.sequences.kind.is_free:
        about |= {"first": saved.first, "checkpoints": [(c.n_tokens, c.first) for c in saved.checkpoints]}
    header = json.dumps(about, separators=(",", ":")).encode()
    parts: list[Part] = [_HEAD.pack(MAGIC, VERSION, len(header)), header, tokens.astype("<i4").tobytes()]
    return [*parts, *saved.parts, *(p for c in saved.checkpoints for p in c.parts)]


def _write(parts: Iterable[Part], path: Path) -> int:
    """Write the content of a file; return its size."""
    digest = hashlib.sha256()
    try:
        with written_whole(path, private=True) as temporary, temporary.open("wb") as f:
            for part in parts:
                data = part if isinstance(part, bytes) else part.tobytes()
                digest.update(data)
                f.write(data)
            f.write(digest.digest())
            f.flush()
            os.fsync(f.fileno())
            n_bytes = f.tell()
    except OSError as e:
        raise EngineError(500, "server_error", f"cannot write {path.name}: {e.strerror or e}") from None
    return n_bytes


def load(session: Session, path: Path, n_ctx: int, added: Added = NOTHING) -> tuple[Tokens, SavedSequence, int]:
    """Read (tokens, sequence, size) from a file of the same model and cache settings; raise EngineError 400 or 404."""
    try:
        data = np.fromfile(path, dtype=np.uint8) if path.is_file() else None
    except OSError as e:
        raise EngineError(400, "invalid_request_error", f"cannot read {path.name}: {e.strerror or e}") from None
    if data is None:
        raise EngineError(404, "not_found_error", f"saved slot {path.name} does not exist")
    header, at = _header(data, path.name)
    _check_header(session, header, path.name)
    if header["added"] != added:
        ways = "POST /lora-adapters and /control-vectors/apply"
        raise _bad(path.name, f"was saved with other scales of adapters or control vectors; set them with {ways}")
    n = int(header["n_tokens"])
    if n > n_ctx:
        raise _bad(path.name, f"holds {n} tokens, but a slot takes {n_ctx}; start again with a larger -c")
    sequences, first, places = session.sequences, header["first"], header["checkpoints"]
    shapes = [sequences.shapes(n, first), *(sequences.checkpoint_shapes(*place) for place in places)]
    wanted = [shape for group in shapes for shape in group]
    end = at + 4 * n + sum(a * b for a, b in wanted)
    if len(data) != end + _DIGEST_BYTES:
        raise _bad(path.name, f"is damaged: it has {len(data)} bytes instead of {end + _DIGEST_BYTES}")
    if hashlib.sha256(data[:end].data).digest() != data[end:].tobytes():
        raise _bad(path.name, "is damaged: its checksum is wrong")
    tokens = np.frombuffer(data[at : at + 4 * n].tobytes(), dtype="<i4").astype(np.int32)
    at += 4 * n
    groups = []
    for group in shapes:
        parts = []
        for shape in group:
            size = shape[0] * shape[1]
            parts.append(data[at : at + size].reshape(shape))
            at += size
        groups.append(tuple(parts))
    checkpoints = tuple(Checkpoint(m, part, begin) for (m, begin), part in zip(places, groups[1:], strict=True))
    return tokens, SavedSequence(n, groups[0], checkpoints, sequences.kind, first), len(data)


def peek(path: Path) -> tuple[int, ...] | None:
    """Return the tokens of a saved slot of any model, or None for another file; read only its beginning."""
    try:
        with path.open("rb") as f:
            start = np.frombuffer(f.read(_HEAD.size), np.uint8)
            n_header = _HEAD.unpack(start.tobytes())[2] if len(start) == _HEAD.size else 0
            rest = np.frombuffer(f.read(max(min(n_header, _MOST_HEADER), _DIGEST_BYTES)), np.uint8)
            header, _ = _header(np.concatenate((start, rest)), path.name)
            f.seek(_HEAD.size + n_header)
            data = f.read(4 * min(int(header["n_tokens"]), path.stat().st_size // 4))
    except (OSError, EngineError):
        return None
    return tuple(np.frombuffer(data[: len(data) // 4 * 4], "<i4").tolist())


def _header(data: npt.NDArray[np.uint8], name: str) -> tuple[dict[str, Any], int]:
    """Return (header, offset of the bytes after it)."""
    if len(data) < _HEAD.size + _DIGEST_BYTES or data[:8].tobytes() != MAGIC:
        raise _bad(name, "is not a saved slot")
    _, version, n_header = _HEAD.unpack(data[: _HEAD.size].tobytes())
    if version != VERSION:
        raise _bad(name, f"has version {version} of the format, this program reads {VERSION}")
    if n_header > min(_MOST_HEADER, len(data)):
        raise _bad(name, "is damaged: its header is cut off")
    try:
        header = json.loads(data[_HEAD.size : _HEAD.size + n_header].tobytes())
        n_tokens, first = header["n_tokens"], header.setdefault("first", 0)
        places = header.setdefault("checkpoints", [])
        numbers = [(n_tokens, first), *((n, begin) for n, begin in places)]
        scales, uses = header.get("added", ((), ()))
        header["added"] = Added(tuple(map(float, scales)), tuple(VectorUse(*use) for use in uses))
        good = isinstance(header["layout"], list) and all(isinstance(x, int) for pair in numbers for x in pair)
        good = good and all(0 <= begin <= n <= n_tokens for n, begin in numbers)
        good = good and all(a[0] < b[0] for a, b in pairwise([(0, 0), *places]))
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise _bad(name, "is damaged: its header cannot be read")
    return header, _HEAD.size + n_header


def _check_header(session: Session, header: dict[str, Any], name: str) -> None:
    if header.get("model") != fingerprint(session):
        raise _bad(name, "was saved with another model")
    if header["layout"] != session.sequences.layout():
        raise _bad(name, "was saved with other cache settings (-ctk, -ctv, -mla, -fa, -khad or -vhad)")


def _bad(name: str, what: str) -> EngineError:
    return EngineError(400, "invalid_request_error", f"{name} {what}")
