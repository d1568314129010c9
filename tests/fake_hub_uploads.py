"""The hub of `fake_hub.py` with the part of the API that uploads need: repositories, branches, large files, commits.

A branch or pull request is a repository of its own, `REPO@REV`. Content of large files comes in one piece, or in
parts where it is longer than `chunk`; it is known by its digest from when it was verified on, in every repository.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from fake_hub import FakeHub, Repo, _handler, digest_of, is_large


class UploadHub(FakeHub):
    """Lets holders of `writers` (token -> account) write.

    `breaks`: bytes after which the connection of a content ends (0: it does not), `lost_commits`: how many commits are
    made whose answer does not arrive, `arrived`: bytes by digest.
    """

    def __init__(self) -> None:
        self.writers = {"hf_writer": "me"}
        self.chunk = 1 << 30
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.sizes: dict[str, int] = {}
        self.breaks: list[int] = []
        self.lost_commits = 0
        self.private: list[str] = []
        self.arrived: Counter[str] = Counter()
        super().__init__()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _upload_handler(self)

    def named(self, path: str) -> str:
        name, _, revision = path.partition("/revision/")
        return at(name, unquote(revision))

    def reset(self) -> None:
        self.blobs, self.parts, self.sizes, self.private = {}, {}, {}, []
        self.breaks, self.lost_commits, self.chunk = [], 0, 1 << 30
        super().reset()

    def forget(self) -> None:
        self.arrived = Counter()
        super().forget()


def at(name: str, revision: str) -> str:
    return name if revision in ("", "main") else f"{name}@{revision}"


def _upload_handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_handler(hub)):  # type: ignore[misc]
        def do_GET(self) -> None:
            if urlsplit(self.path).path != "/api/whoami-v2":
                return super().do_GET()  # type: ignore[no-any-return]
            hub.requests.append("GET /api/whoami-v2")
            name = hub.writers.get(self.token())
            return self.say({"type": "user", "name": name}) if name else self.fail(401)

        def do_PUT(self) -> None:
            self.change()

        def do_POST(self) -> None:
            self.change()

        def token(self) -> str:
            return str(self.headers.get("Authorization", "")).removeprefix("Bearer ")

        def say(self, found: Any, status: int = 200, **headers: str) -> None:
            text = json.dumps(found).encode()
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def change(self) -> None:
            url = urlsplit(self.path)
            path, query = unquote(url.path), parse_qs(url.query)
            hub.requests.append(f"{self.command} {path}")
            if self.command == "PUT":
                return self.content_arrives(path.removeprefix("/content/"), int(query.get("part", ["0"])[0]))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if hub.faults.statuses:
                return self.fail(hub.faults.statuses.pop(0))
            if path == "/api/validate-yaml":
                return self.say({"errors": [], "warnings": []})
            if path.startswith("/complete/"):
                return self.complete(path.removeprefix("/complete/"))
            if self.token() not in hub.writers:
                return self.fail(403)
            if path.startswith("/verify/"):
                return self.say({}) if path.removeprefix("/verify/") in hub.blobs else self.fail(422)
            if path == "/api/repos/create":
                return self.create(json.loads(body))
            if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                return self.batch(json.loads(body))
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path):
                name, what, revision = found.groups()
                if name not in hub.repos:
                    return self.fail(404, "RepoNotFound")
                if what == "branch":
                    hub.add(at(name, revision), dict(hub.repos[name].files))
                    return self.say({})
                if what == "preupload":
                    return self.preupload(at(name, revision), json.loads(body))
                return self.commit(name, revision, [json.loads(x) for x in body.splitlines()], "create_pr" in query)
            return self.fail(404)

        def create(self, wanted: dict[str, Any]) -> None:
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if name in hub.repos:
                return self.fail(409)
            if not name.startswith("me/"):
                return self.fail(403)
            hub.add(name, {".gitattributes": b"*.gguf filter=lfs\n"})
            hub.private += [name] if wanted.get("visibility") == "private" or wanted.get("private") else []
            return self.say({"url": f"{hub.url}/{name}"})

        def preupload(self, name: str, asked: dict[str, Any]) -> None:
            files = []
            for file in asked["files"]:
                mode = "lfs" if is_large(file["path"]) else "regular"
                found: dict[str, Any] = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
                if name in hub.repos and file["path"] in hub.repos[name].files:
                    found["oid"] = digest_of(file["path"], hub.repos[name].files[file["path"]])
                files.append(found)
            self.say({"files": files})

        def batch(self, asked: dict[str, Any]) -> None:
            objects = []
            for wanted in asked["objects"]:
                oid, size = wanted["oid"], wanted["size"]
                found: dict[str, Any] = {"oid": oid, "size": size}
                if oid not in hub.blobs:
                    hub.sizes[oid] = size
                    header: dict[str, str] = {}
                    href = f"{hub.url}/content/{oid}"
                    if size > hub.chunk:
                        header = {str(i + 1): f"{href}?part={i + 1}" for i in range(-(-size // hub.chunk))}
                        header["chunk_size"], href = str(hub.chunk), f"{hub.url}/complete/{oid}"
                    verify = {"href": f"{hub.url}/verify/{oid}"}
                    found["actions"] = {"upload": {"href": href, "header": header}, "verify": verify}
                objects.append(found)
            self.say({"transfer": "basic", "objects": objects})

        def content_arrives(self, oid: str, part: int) -> None:
            left = int(self.headers["Content-Length"])
            ends = (hub.breaks.pop(0) if hub.breaks else 0) or left
            data = self.rfile.read(ends)
            hub.arrived[oid] += len(data)
            if ends < left:
                self.close_connection = True
                self.connection.close()
                return
            hub.parts[oid, part] = data
            if part == 0:
                hub.blobs[oid] = data
            self.say({}, ETag=hashlib.md5(data).hexdigest())

        def complete(self, oid: str) -> None:
            data = b"".join(piece for (of, _), piece in sorted(hub.parts.items()) if of == oid)
            if hashlib.sha256(data).hexdigest() != oid:
                return self.fail(400)
            hub.blobs[oid] = data
            return self.say({})

        def commit(self, name: str, revision: str, lines: list[dict[str, Any]], as_pr: bool) -> None:
            if as_pr:
                revision = f"refs/pr/{1 + sum(known.startswith(f'{name}@refs/pr/') for known in hub.repos)}"
                hub.add(at(name, revision), dict(hub.repos[name].files))
            target = hub.repos[at(name, revision)]
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    target.files[value["path"]] = base64.b64decode(value["content"])
                elif value["oid"] in hub.blobs:
                    target.files[value["path"]] = hub.blobs[value["oid"]]
                else:
                    return self.fail(422)
            target.commit = hashlib.sha1(json.dumps(lines).encode()).hexdigest()
            if hub.lost_commits:
                hub.lost_commits -= 1
                self.close_connection = True
                self.connection.close()
                return
            found = {"commitUrl": f"{hub.url}/{name}/commit/{target.commit}", "commitOid": target.commit}
            if as_pr:
                found["pullRequestUrl"] = f"{hub.url}/{name}/discussions/{revision.rsplit('/', 1)[1]}"
            self.say(found)

    return Handler


def repo_files(hub: UploadHub, name: str) -> dict[str, bytes]:
    """Files of a repository without those that every new one has."""
    found: Repo = hub.repos[name]
    return {path: data for path, data in found.files.items() if path != ".gitattributes"}
