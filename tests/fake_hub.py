"""A server that speaks the part of a hub's API that downloads need, with the failures that networks have.

`GET /api/models/REPO` (files with their sizes and digests), `HEAD` and `GET /REPO/resolve/REV/PATH`, which redirects
large files to `/cdn/DIGEST` with the headers of the hub, and `/files/NAME` for plain URLs. Ranges everywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """Files by path; `gated` repositories show their files, but give them only to the holder of `token`."""

    files: dict[str, bytes]
    token: str = ""
    gated: bool = False
    commit: str = COMMIT


@dataclass
class Faults:
    """What goes wrong: answers of content cut after so many bytes (each once), statuses instead of answers (each once),
    bytes changed, ranges not given."""

    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    flip: bool = False
    no_ranges: bool = False


def digest_of(path: str, data: bytes) -> str:
    """As the hub: SHA-256 of large files, the id of the git blob of others."""
    if is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors"))


class Server(ThreadingHTTPServer):
    """Clients that stop in the middle are nothing to report."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FakeHub:
    """The server; `requests` are "METHOD path [range]" in the order of arrival, `n_sent` the bytes of content."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.plain: dict[str, bytes] = {}
        self.faults = Faults()
        self.requests: list[str] = []
        self.tokens: list[tuple[str, str]] = []  # (path, token) of every request
        self.n_sent = 0
        self.server = Server(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _handler(self)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> Repo:
        self.repos[name] = Repo(files, **settings)
        return self.repos[name]

    def named(self, path: str) -> str:
        """The repository of `REPO/revision/REV`; all revisions are one."""
        return path.split("/revision/")[0]

    def reset(self) -> None:
        self.repos, self.plain, self.faults = {}, {}, Faults()
        self.forget()

    def forget(self) -> None:
        """Forget what has been asked so far."""
        self.requests, self.tokens, self.n_sent = [], [], 0

    def asked(self, pattern: str) -> list[str]:
        return [request for request in self.requests if re.search(pattern, request)]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            hub.tokens.append((path, token))
            if hub.faults.statuses:
                return self.fail(hub.faults.statuses.pop(0))
            if path.startswith("/api/models/"):
                return self.info(hub.named(path.removeprefix("/api/models/")), token)
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self.resolve(found[1], found[3], token, body)
            if path.startswith("/cdn/"):
                for repo in hub.repos.values():
                    for name, data in repo.files.items():
                        if digest_of(name, data) == path.removeprefix("/cdn/"):
                            return self.content(data, body, digest_of(name, data))
            if path.removeprefix("/files/") in hub.plain:
                data = hub.plain[path.removeprefix("/files/")]
                return self.content(data, body, hashlib.md5(data).hexdigest())
            return self.fail(404)

        def info(self, name: str, token: str) -> None:
            repo = hub.repos.get(name)
            if repo is None or (repo.token and not repo.gated and token != repo.token):
                return self.fail(404 if token else 401, "RepoNotFound")
            siblings = []
            for path, data in sorted(repo.files.items()):
                entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
                if is_large(path):
                    entry["lfs"] = {"sha256": digest_of(path, data), "size": len(data), "pointerSize": 134}
                else:
                    entry["blobId"] = digest_of(path, data)
                siblings.append(entry)
            text = json.dumps(
                {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": []}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def resolve(self, name: str, path: str, token: str, body: bool) -> None:
            repo = hub.repos.get(name)
            if repo is None:
                return self.fail(404, "RepoNotFound")
            if repo.token and token != repo.token:
                return self.fail(403 if token else 401, "GatedRepo")
            if path not in repo.files:
                return self.fail(404, "EntryNotFound")
            digest = digest_of(path, repo.files[path])
            if not is_large(path):
                return self.content(repo.files[path], body, digest, {"X-Repo-Commit": repo.commit})
            self.send_response(302)
            self.send_header("X-Repo-Commit", repo.commit)
            self.send_header("X-Linked-Size", str(len(repo.files[path])))
            self.send_header("X-Linked-ETag", f'"{digest}"')
            self.send_header("Location", f"http://localhost:{hub.server.server_address[1]}/cdn/{digest}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def content(self, data: bytes, body: bool, etag: str, extra: dict[str, str] | None = None) -> None:
            start, stop, status = 0, len(data), 200
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if self.headers.get("If-Range", f'"{etag}"') != f'"{etag}"':
                found = None
            if found and not hub.faults.no_ranges:
                start, stop, status = int(found[1]), min(len(data), int(found[2]) + 1 if found[2] else len(data)), 206
                if start >= len(data):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(data)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
            piece = data[start:stop]
            if hub.faults.flip:
                piece = bytes([piece[0] ^ 1]) + piece[1:] if start else piece[:-1] + bytes([piece[-1] ^ 1])
            self.send_response(status)
            for key, value in (extra or {}).items():
                self.send_header(key, value)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(piece)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.end_headers()
            if not body:
                return
            if hub.faults.cuts and len(piece) > hub.faults.cuts[0]:
                piece = piece[: hub.faults.cuts.pop(0)]
                self.close_connection = True
            hub.n_sent += len(piece)
            self.wfile.write(piece)

        def fail(self, status: int, code: str = "") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
