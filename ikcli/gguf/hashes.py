"""Compute digests of tensor data, per tensor and over the model, with the names and bytes of gguf-hash.

They do not cover metadata, names and shapes. `uuid` is a version 5 UUID of the data in its own name space; it exists
for whole models only. A split model has the same digests as the model in one file.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UsageError
from ikcli.gguf.reader import GGUFFile
from ikcli.text_files import read_text

HASHES = ("xxh64", "sha1", "sha256", "uuid")
_UUID_NAMESPACE = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")
_CHUNK = 32 << 20
_MASK = 2**64 - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_STRIPE = 32


class Hasher(Protocol):
    """The interface of hashlib objects."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class Xxh64:
    """XXH64 with seed 0. A compiled kernel consumes stripes of 32 bytes; the rest is done here."""

    def __init__(self) -> None:
        self._lanes = np.array([(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK], np.uint64)
        self._rest = b""
        self._n = 0

    def update(self, data: memoryview | bytes, /) -> None:
        view = np.frombuffer(data, np.uint8)
        self._n += len(view)
        if self._rest:
            missing = _STRIPE - len(self._rest)
            self._rest += view[:missing].tobytes()
            view = view[missing:]
            if len(self._rest) < _STRIPE:
                return
            self._stripes(np.frombuffer(self._rest, np.uint8))
        whole = len(view) // _STRIPE * _STRIPE
        self._stripes(view[:whole])
        self._rest = view[whole:].tobytes()

    def _stripes(self, data: npt.NDArray[np.uint8]) -> None:
        if len(data):
            _kernel()(data.__array_interface__["data"][0], len(data) // _STRIPE, self._lanes.ctypes.data)

    def hexdigest(self) -> str:
        lanes = [int(x) for x in self._lanes]
        total = _P5
        if self._n >= _STRIPE:
            total = sum(_rotate(x, by) for x, by in zip(lanes, (1, 7, 12, 18), strict=True))
            for lane in lanes:
                total = ((total ^ _mix(0, lane)) * _P1 + _P4) & _MASK
        total = (total + self._n) & _MASK
        rest = self._rest
        while len(rest) >= 8:
            total = (_rotate(total ^ _mix(0, int.from_bytes(rest[:8], "little")), 27) * _P1 + _P4) & _MASK
            rest = rest[8:]
        if len(rest) >= 4:
            word = int.from_bytes(rest[:4], "little") * _P1 & _MASK
            total = (_rotate(total ^ word, 23) * _P2 + _P3) & _MASK
            rest = rest[4:]
        for byte in rest:
            total = _rotate(total ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
        total = (total ^ (total >> 33)) * _P2 & _MASK
        total = (total ^ (total >> 29)) * _P3 & _MASK
        return f"{total ^ (total >> 32):016x}"


def _rotate(x: int, by: int) -> int:
    x &= _MASK
    return (x << by | x >> (64 - by)) & _MASK


def _mix(lane: int, word: int) -> int:
    return _rotate(lane + word * _P2, 31) * _P1 & _MASK


@functools.cache
def _kernel() -> Callable[..., int]:
    from ikcli.native.kernel_cache import KernelKey
    from ikcli.native.kernel_library import native_function, shared_library

    key = KernelKey("ikcli.native.xxh64", "make_stripes")
    shared_library().require([key])
    return native_function(shared_library()[key], 3)


class _Uuid5:
    """A version 5 UUID: SHA-1 over name space and data."""

    def __init__(self) -> None:
        self._sha1 = hashlib.sha1(_UUID_NAMESPACE.bytes)

    def update(self, data: memoryview, /) -> None:
        self._sha1.update(data)

    def hexdigest(self) -> str:
        return str(uuid.UUID(bytes=self._sha1.digest()[:16], version=5))


_MAKERS: dict[str, Callable[[], Hasher]] = {
    "xxh64": Xxh64,
    "sha1": hashlib.sha1,
    "sha256": hashlib.sha256,
    "uuid": _Uuid5,
}


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest; `tensor` is empty for the whole model."""

    kind: str
    digest: str
    tensor: str


def parse_hashes(text: str, option: str = "--hash") -> tuple[str, ...]:
    """Parse a list such as `sha256,uuid`, or `all` (all but uuid, as in gguf-hash); other names are a UsageError."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return HASHES[:-1]
    if not names or (bad := [name for name in names if name not in HASHES]):
        raise UsageError(f'{option}: "{bad[0] if names else text}" is not a digest; use {", ".join(HASHES)} or all')
    return tuple(name for name in HASHES if name in names)


def hash_tensors(
    file: GGUFFile,
    kinds: Sequence[str],
    *,
    per_tensor: bool = True,
    advance: Callable[[float], None] = lambda n_bytes: None,
) -> Iterator[Digest]:
    """Yield the digests of every tensor in file order, then those of the model. The data is read once."""
    totals = {kind: _MAKERS[kind]() for kind in kinds}
    for t in file.tensors.values():
        own = {kind: _MAKERS[kind]() for kind in kinds if per_tensor and kind != "uuid"}
        data = file.data(t.name)
        for start in range(0, t.n_bytes, _CHUNK):
            piece = data[start : start + _CHUNK]
            for hasher in (*own.values(), *totals.values()):
                hasher.update(piece.data)
            file.release(t.name, start, start + len(piece))
            advance(len(piece))
        yield from (Digest(kind, hasher.hexdigest(), t.name) for kind, hasher in own.items())
    yield from (Digest(kind, hasher.hexdigest(), "") for kind, hasher in totals.items())


@dataclass(frozen=True, slots=True)
class Manifest:
    """Digests written earlier: (kind, tensor or "" for the model) -> digest."""

    path: Path
    digests: dict[tuple[str, str], str]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the strongest kind of digest present, the default of a check."""
        found = {kind for kind, _ in self.digests}
        return tuple(kind for kind in ("sha256", "sha1", "xxh64", "uuid") if kind in found)[:1]

    def verdict(self, found: Digest) -> str:
        """Compare a digest: return `ok`, `mismatch` or `not found`."""
        expected = self.digests.get((found.kind, found.tensor))
        return "not found" if expected is None else "ok" if expected == found.digest else "mismatch"


def read_manifest(path: Path) -> Manifest:
    """Read lines `KIND DIGEST FILE[:TENSOR]`, as gguf-hash and `ik inspect --hash` print them; FILE does not matter."""
    lines = read_text(path, error=FormatError).splitlines()
    digests: dict[tuple[str, str], str] = {}
    for line in lines:
        kind, _, rest = line.strip().partition(" ")
        digest, _, name = rest.strip().partition(" ")
        if kind in HASHES and name.strip():
            digests[kind, _tensor_of(name.strip())] = digest.lower()
    if not digests:
        raise FormatError(f"{path}: no line is KIND DIGEST FILE[:TENSOR] with one of {', '.join(HASHES)}")
    return Manifest(path, digests)


def _tensor_of(name: str) -> str:
    """Return the tensor of `model.gguf:blk.0.attn_q.weight`; directories and drives may contain colons, too."""
    _, mark, tensor = name.rpartition(".gguf:")
    if not mark:
        tensor = name.rpartition(":")[2] if ":" in name else ""
    return "" if "/" in tensor or "\\" in tensor else tensor
