"""Files that a node lacks, fetched from the machine of the command: once per node, in pieces with checksums.

A worker's factory lists the files it needs (`files`). A file that is missing at the same path on a node goes to the
node's cache under its digest, where later runs find it. The server hands out only these files, and only to clients that
present the token of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ikcli.errors import IkError
from ikcli.gguf.constants import GGUF_MAGIC
from ikcli.gguf.reader import open_gguf
from ikcli.log import log, shown_size
from ikcli.native.kernel_cache import cache_root
from ikcli.system_files import lock

_PIECE = 32 << 20
_SHA256 = "X-Sha256"
_TRIES, _TIMEOUT = 3, 120


@dataclass(frozen=True, slots=True)
class Needed:
    """A file, or all parts of a model, by the paths of the command; `sources` is where the command finds them."""

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    digest: str
    sources: tuple[Path, ...]


def needed_by(factory: Any) -> list[Needed]:
    """Return the files that a factory lists in `files`: pairs of a path and a digest."""
    return needed_of(getattr(factory, "files", ()))


def needed_of(found: Sequence[tuple[Path, str]]) -> list[Needed]:
    """Describe files given as (path, digest), with all parts of split models."""
    out = []
    for path, digest in found:
        sources = parts_of(path)
        paths = tuple(path.with_name(source.name) for source in sources)
        out.append(Needed(paths, tuple(source.stat().st_size for source in sources), digest, sources))
    return out


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all parts of a model, or the file itself."""
    with path.open("rb") as file:
        is_model = file.read(4) == GGUF_MAGIC
    return tuple(open_gguf(path).paths) if is_model else (path,)


# --- where the command runs -------------------------------------------------------------------------------------------
class FileServer:
    """Serves pieces of the files while entered as a context."""

    def __init__(self, host: str, needed: Sequence[Needed]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._sources = [needed_file.sources for needed_file in needed]
        handler = type("Handler", (_Handler,), {"token": self.token, "sources": self._sources})
        self._server = ThreadingHTTPServer((host, 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"

    def add(self, needed: Sequence[Needed]) -> int:
        """Serve more files and return the index of the first of them."""
        first = len(self._sources)
        self._sources += [one.sources for one in needed]
        return first

    def __enter__(self) -> FileServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /FILE/PART/OFFSET with the piece that starts there."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and piece are two writes; the second would wait for the first to arrive
    token = ""
    sources: Sequence[Sequence[Path]] = ()

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            self._answer(403, b"")
            return
        try:
            index, part, offset = (int(word) for word in self.path.strip("/").split("/"))
            if min(index, part, offset) < 0:
                raise ValueError(self.path)
            with self.sources[index][part].open("rb") as file:
                file.seek(offset)
                data = file.read(_PIECE)
        except (ValueError, IndexError, OSError):
            self._answer(404, b"")
            return
        self._answer(200, data)

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header(_SHA256, hashlib.sha256(data).hexdigest())
        self.end_headers()
        with contextlib.suppress(OSError):  # the client is gone
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


# --- where a worker runs ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Fetching:
    """Wraps a factory so that missing files are fetched on the node before the worker is made.

    `first`: index of the first file at the server. `check`: computes the digest of a fetched file, if it is to be
    verified.
    """

    factory: Callable[[], Any]
    needed: tuple[Needed, ...]
    url: str
    token: str
    first: int = 0
    check: Callable[[Path], str] | None = None

    def __call__(self) -> Any:
        """Fetch what is missing and make the worker."""
        places: dict[Path, Path] = {}
        for index, file in enumerate(self.needed, self.first):
            if not all(path.is_file() for path in file.paths):
                places.update(zip(file.paths, fetch(file, index, self.url, self.token, self.check), strict=True))
        return (moved(self.factory, places) if places else self.factory)()


def moved(value: Any, places: dict[Path, Path]) -> Any:
    """Return a value with the paths in `places` replaced wherever they occur: as paths, as text, in nested records."""
    if isinstance(value, Path):
        return places.get(value, value)
    if isinstance(value, str):
        found = places.get(Path(value)) if value.startswith("/") else None
        return value if found is None else str(found)
    if type(value) is tuple:
        return tuple(moved(item, places) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: new for name, old in fields.items() if (new := moved(old, places)) is not old}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def fetch(file: Needed, index: int, url: str, token: str, check: Callable[[Path], str] | None = None) -> list[Path]:
    """Return the paths of a file in the cache of this node; one worker at a time fetches what is missing.

    `check` computes the digest of what was fetched; IkError if it differs.
    """
    folder = cache_root().parent / "fleet" / file.digest[:32]
    found = [folder / path.name for path in file.paths]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                begun = _fetch(file, index, url, token, folder)
                if check is not None and check(begun / found[0].name) != file.digest:
                    shutil.rmtree(begun)
                    raise IkError(f"{found[0].name} changed while it was fetched, or before")
                os.replace(begun, folder)
    except OSError as error:
        raise IkError(f"cannot keep {file.paths[0].name} in {folder}: {error.strerror or error}") from None
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        lock(file)
        yield


def _fetch(file: Needed, index: int, url: str, token: str, folder: Path) -> Path:
    """Download into a partial folder and return it; the caller renames it to `folder`."""
    begun = folder.with_suffix(".part")
    begun.mkdir(exist_ok=True)
    free, total = shutil.disk_usage(begun).free, sum(file.sizes)
    there = sum(path.stat().st_size for path in begun.iterdir())
    name, need = file.paths[0].name, total - there
    if need > free:
        raise IkError(
            f"{begun.parent}: {name} needs {shown_size(need)}, {shown_size(free)} are free; "
            "make room, or set IK_CACHE_DIR to a folder on a larger disk"
        )
    log(f"fetching {file.paths[0].name}, {shown_size(total)}, into {folder}")
    for part, (path, size) in enumerate(zip(file.paths, file.sizes, strict=True)):
        with (begun / path.name).open("ab") as out:
            at = out.tell()
            while at < size:
                data = _piece(url, token, f"/{index}/{part}/{at}")
                if not data:
                    raise IkError(f"{path.name} became shorter while it was fetched")
                out.write(data)
                at += len(data)
            out.flush()
            os.fsync(out.fileno())
            if at != size:
                out.truncate(0)
                raise IkError(f"{path.name} changed while it was fetched")
    return begun


def _piece(url: str, token: str, path: str) -> bytes:
    """Return one piece; retry if it arrives damaged or not at all."""
    problem = ""
    for _ in range(_TRIES):
        try:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT)
            with contextlib.closing(connection):
                connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
                answer = connection.getresponse()
                data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
            continue
        if answer.status != http.HTTPStatus.OK:
            raise IkError(f"the machine of the command does not serve {path} (status {answer.status})")
        if hashlib.sha256(data).hexdigest() == answer.headers.get(_SHA256):
            return data
        problem = "it arrived damaged"
    raise IkError(f"a file cannot be fetched from {url}, the machine of the command: {problem}; is the port open?")
