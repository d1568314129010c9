"""Download a file over HTTP: resume it, retry when the connection fails, check it at the end.

Bytes arrive in NAME.incomplete, which stays when a download stops. `hf_hub_download` is not used for this: it deletes
the part that has arrived when a download stops, fetches up to 10 MiB again after every cut, and compares no digest. Xet
writes a file in many places at once, so a part of it cannot be resumed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikcli.errors import IkError
from ikcli.gguf import digests
from ikcli.hub import client
from ikcli.log import shown_size

_PIECE = 16 << 30  # bytes per request, as content delivery networks limit the size of a response
_KEPT_FREE = 64 << 20


class ChecksumError(IkError):
    """The downloaded bytes differ from the file of the hub."""


@dataclass(frozen=True, slots=True)
class Download:
    """The source of a file; unknown `size` is -1, unknown `digest` "". `what` (a repository or URL) is for messages."""

    url: str
    what: str
    size: int = -1
    digest: str = ""
    token: str = ""


def incomplete_path(target: Path) -> Path:
    """Return the path of the part that has arrived."""
    return target.with_name(target.name + ".incomplete")


def kept_bytes(target: Path) -> int:
    """Return the number of bytes that have arrived."""
    part = incomplete_path(target)
    return part.stat().st_size if part.is_file() else 0


def check_space(folder: Path, needed: int) -> None:
    """Raise an IkError if the disk of `folder` lacks room for `needed` more bytes."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > 0 and needed + _KEPT_FREE > free:
        raise IkError(
            f"not enough room in {folder}: {shown_size(needed)} are needed, {shown_size(free)} are free; remove models "
            "with ik rm, or put the cache on another disk with HF_HOME"
        )


def download(source: Download, target: Path, advance: Callable[[float], None] = lambda n: None) -> None:
    """Download the file to `target`, under another name until it is complete and its digest is right.

    `advance` is told the number of bytes that arrive, also of those from earlier runs. Raise a NetworkError if the
    connection fails for good; bytes that have arrived are kept.
    """
    part = incomplete_path(target)
    with disk_errors(target, source.what):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("ab") as out:
                _fill(source, part, out, advance)
        except KeyboardInterrupt:
            kept = shown_size(kept_bytes(target))
            raise KeyboardInterrupt(f"interrupted; {kept} are kept, and the same command goes on from there") from None
        _check(source, part)
        part.replace(target)
        part.with_name(part.name + ".etag").unlink(missing_ok=True)


@contextmanager
def disk_errors(target: Path, what: str) -> Iterator[None]:
    """Turn errors of a full or read-only disk into an IkError about the download."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise IkError(
                f"the disk of {target.parent} is full; {shown_size(kept_bytes(target))} of {what} are kept, and the "
                "same command goes on from there"
            ) from problem
        if isinstance(problem, PermissionError | NotADirectoryError | FileExistsError) or problem.errno == errno.EROFS:
            reason = problem.strerror or problem
            raise IkError(
                f"cannot write to {target.parent}: {reason}; HF_HOME names another cache (LLAMA_CACHE for URLs)"
            ) from problem
        raise


def _fill(source: Download, part: Path, out: Any, advance: Callable[[float], None]) -> None:
    """Append to the part until it is complete."""
    done = out.seek(0, os.SEEK_END)
    if 0 <= source.size < done:
        done = _restart(out)
    advance(done)

    def more() -> bool:
        """Make one more request, which continues the one that was cut off; return whether all bytes are there."""
        before = out.tell()
        try:
            done, whole = _one_request(source, part, out, before, advance)
        except client.network_error():
            out.flush()
            if out.tell() <= before:
                raise
            client.pause(0)
            return False
        if not whole and done == before:
            raise client.network_error()("the server sends nothing more")
        return whole

    try:
        while out.tell() != source.size and not client.call(more, source.what, source.token):
            pass
    except client.HubError as problem:
        raise _stopped(problem, part) from problem.__cause__


def _one_request(
    source: Download, part: Path, out: Any, done: int, advance: Callable[[float], None]
) -> tuple[int, bool]:
    """Append the bytes of one request; return the size of the part and whether it is known to be complete."""
    stop = min(source.size, done + _PIECE) if source.size >= 0 else 0
    tag_file = part.with_name(part.name + ".etag")  # the version of the part, for files without a digest
    tag = tag_file.read_text(encoding="utf-8") if done and not source.digest and tag_file.is_file() else ""
    piece = stop if done or source.size > _PIECE else 0
    with client.stream(source.url, source.token, done, piece, tag) as response:
        if response.status_code == 416:  # the part has all bytes
            total = re.search(r"/(\d+)$", response.headers.get("Content-Range", ""))
            if total is not None and int(total[1]) == done:
                return done, True
            advance(-done)
            return _restart(out), False
        if done and response.status_code != 206:  # the server sends the whole file again
            advance(-done)
            done = _restart(out)
        if not source.digest and not done:
            tag_file.write_text(response.headers.get("ETag", ""), encoding="utf-8")
        length = response.headers.get("Content-Length")
        expected = done + int(length) if length is not None and length.isdigit() else -1
        for chunk in response.iter_raw():
            out.write(chunk)
            done += len(chunk)
            advance(len(chunk))
        out.flush()
    if source.size < 0:
        return done, expected in (-1, done)
    if done > source.size:
        return done, True  # the final check refuses it
    return done, done == source.size


def _restart(out: Any) -> int:
    out.seek(0)
    out.truncate()
    return 0


def _stopped(problem: IkError, part: Path) -> IkError:
    kept = part.stat().st_size if part.exists() else 0
    if not kept:
        return problem
    return client.NetworkError(
        f"{problem}; {shown_size(kept)} are kept in {part}, and the same command goes on from there"
    )


def _check(source: Download, part: Path) -> None:
    """Refuse a file whose size or digest differs from the hub's, and remove it."""
    size = part.stat().st_size
    wrong = f"it has {size} bytes, not {source.size}" if source.size not in (-1, size) else ""
    if not wrong and source.digest and file_digest(part, source.digest) != source.digest:
        wrong = f"its {'SHA-256' if len(source.digest) == 64 else 'git hash'} is not the one the hub has"
    if wrong:
        part.unlink()
        raise ChecksumError(
            f"{source.what}: what was downloaded from {source.url} is damaged ({wrong}) and was removed; try again, "
            "and if that does not help, look at the proxy or mirror in between"
        )


def file_digest(path: Path, like: str) -> str:
    """Return the SHA-256 of a file, or its git blob id if `like` has the length of one."""
    if len(like) == 64:
        return digests.of_file(path)
    with path.open("rb") as file:
        start = b"blob %d\0" % path.stat().st_size
        return hashlib.file_digest(file, lambda: hashlib.sha1(start, usedforsecurity=False)).hexdigest()
