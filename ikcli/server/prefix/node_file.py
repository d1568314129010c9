"""Files that hold a node of the prompt cache: keys, rows and checkpoints of a run of positions.

Layout, little-endian: magic `ik-rows\\n`, u32 version, u32 length of the header, the header (JSON), int32 keys, the
rows of every cache tensor, the parts of every checkpoint, and the SHA-256 of everything before it. The header has what
the rows belong to (`about`: model, layout, settings; `added`: adapters and control vectors), the file of the positions
before (`after`), the first position, and the checkpoints. A file is written under a temporary name, synced and
renamed, so it is either complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.control_vectors import VectorUse
from ikcli.engine.run.saved_sequence import Bytes, Checkpoint
from ikcli.errors import IkError
from ikcli.files import written_whole
from ikcli.server.prefix.keys import Tokens
from ikcli.server.prefix.rest import Rest

MAGIC, VERSION = b"ik-rows\n", 1
SUFFIX = ".rows"
_HEAD = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_MOST_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds; without rows if only its beginning was read."""

    after: str
    start: int
    tokens: Tokens
    added: Added
    rows: tuple[Bytes, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def n_bytes(self) -> int:
        rows = sum(part.nbytes for part in self.rows)
        return self.tokens.nbytes + rows + sum(c.n_bytes for c in self.checkpoints)


def name_of(about: Mapping[str, Any], added: Added, start: int, tokens: Tokens) -> str:
    """Return the name of the file for the positions from `start` on of a text, by all of its keys."""
    digest = hashlib.sha256(repr((sorted(about.items()), added)).encode() + tokens.astype("<i4").tobytes())
    return f"{start:08d}-{digest.hexdigest()[:32]}{SUFFIX}"


def write(path: Path, about: Mapping[str, Any], content: Content) -> int:
    """Write a file; return its size. Raise OSError if that fails; then no file exists."""
    header = {
        "about": dict(about), "added": (content.added.scales, content.added.vectors), "after": content.after,
        "start": content.start, "n": len(content.tokens),
        "checkpoints": [(c.n_tokens, c.first, c.likely) for c in content.checkpoints],
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    parts: list[bytes | memoryview] = [_HEAD.pack(MAGIC, VERSION, len(text)), text, content.tokens.astype("<i4").data]
    groups = (content.rows, *(c.parts for c in content.checkpoints))
    parts += [np.ascontiguousarray(part).data for group in groups for part in group if part.size]
    digest = hashlib.sha256()
    with written_whole(path, private=True) as temporary, temporary.open("wb") as f:
        for part in parts:
            digest.update(part)
            f.write(part)
        f.write(digest.digest())
        f.flush()
        os.fsync(f.fileno())
        return f.tell()


def extend(path: Path, about: Mapping[str, Any], more: Sequence[Checkpoint], rest: Rest) -> int:
    """Add checkpoints to a file, in place of those at the same positions; return by how many bytes it grew.

    Raise IkError if the file cannot be used, OSError if it cannot be written; then it stays as it is.
    """
    content = read(path, about, rest)
    known = {c.n_tokens: c for c in (*content.checkpoints, *more)}
    size = path.stat().st_size
    return write(path, about, replace(content, checkpoints=tuple(known[n] for n in sorted(known)))) - size


def peek(path: Path, about: Mapping[str, Any]) -> Content | None:
    """Return what the beginning of a file says, None if it is not for this model, layout and settings."""
    try:
        with path.open("rb") as f:
            found = _header(f.read(_HEAD.size), f.read)
            if found is None or found["about"] != dict(about):
                return None
            data = f.read(4 * found["n"])
    except OSError:
        return None
    if len(data) != 4 * found["n"]:
        return None
    checkpoints = tuple(Checkpoint(n, (), first, likely) for n, first, likely in found["checkpoints"])
    return Content(found["after"], found["start"], np.frombuffer(data, "<i4").astype(np.int32), found["added"],
                   checkpoints=checkpoints)  # fmt: skip


def read(path: Path, about: Mapping[str, Any], rest: Rest) -> Content:
    """Read a whole file; raise IkError with a sentence if it cannot be used."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as e:
        raise IkError(f"cannot read {path.name}: {e.strerror or e}") from None
    at = _HEAD.size

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        return data[at - n : at].tobytes()

    found = _header(data[:at].tobytes(), take)
    if found is None or found["about"] != dict(about):
        raise IkError(f"{path.name} is damaged: its header cannot be read")
    n = found["n"]
    groups = [rest.shapes(n)]
    groups += [rest.checkpoint_shapes(end, first) for end, first, _ in found["checkpoints"]]
    end = at + 4 * n + sum(a * b for group in groups for a, b in group)
    if len(data) != end + _DIGEST_BYTES or hashlib.sha256(data[:end].data).digest() != data[end:].tobytes():
        raise IkError(f"{path.name} is damaged: its checksum is wrong")
    tokens = np.frombuffer(take(4 * n), "<i4").astype(np.int32)
    parts = [tuple(_parts(data, group, at + before)) for group, before in zip(groups, _offsets(groups), strict=True)]
    checkpoints = tuple(
        Checkpoint(m, part, first, likely)
        for (m, first, likely), part in zip(found["checkpoints"], parts[1:], strict=True)
    )
    return Content(found["after"], found["start"], tokens, found["added"], parts[0], checkpoints)


Shapes = Sequence[tuple[int, int]]


def _offsets(groups: Sequence[Shapes]) -> list[int]:
    sizes = [sum(a * b for a, b in group) for group in groups]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _parts(data: Bytes, shapes: Shapes, at: int) -> Iterator[Bytes]:
    for a, b in shapes:
        yield data[at : at + a * b].reshape(a, b)
        at += a * b


def _header(head: bytes, read_more: Any) -> dict[str, Any] | None:
    """Return the checked header, None for another file or version."""
    if len(head) < _HEAD.size:
        return None
    magic, version, n_header = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION or n_header > _MOST_HEADER:
        return None
    try:
        found = json.loads(read_more(n_header))
        scales, uses = found["added"]
        found["added"] = Added(tuple(map(float, scales)), tuple(VectorUse(*use) for use in uses))
        start, n, places = found["start"], found["n"], [(a, b, bool(c)) for a, b, c in found["checkpoints"]]
        numbers = [start, n, *(x for a, b, _ in places for x in (a, b))]
        good = all(isinstance(x, int) and x >= 0 for x in numbers) and isinstance(found["after"], str)
        good = good and n > 0 and all(start < a <= start + n and b <= a for a, b, _ in places)
        good = good and all(a[0] < b[0] for a, b in pairwise(places)) and isinstance(found["about"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    found["checkpoints"] = places
    return found if good else None
