"""Static files: the web page at `/`, or with `--path` a folder of the user's. Nothing outside of it is ever served."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ikcli.config_groups import ServerConfig
from ikcli.errors import UsageError
from ikcli.server.http.errors import ApiError

_WEB = "ikcli.server.web"
_SHOWN = (".html", ".js", ".css", ".svg", ".png", ".ico", ".json", ".woff2", ".webmanifest")


def add_routes(app: FastAPI, config: ServerConfig) -> frozenset[str]:
    """Serve the page or the folder; returns the paths that are open without a key."""
    if config.path is not None:
        _add_folder(app, config.path)
        return frozenset()
    if not config.ui or config.webui == "none":
        return frozenset()
    return _add_page(app)


def _add_page(app: FastAPI) -> frozenset[str]:
    folder = resources.files("ikcli.server").joinpath("web")
    if not folder.is_dir():
        return frozenset()
    paths = set()
    for item in folder.iterdir():
        if item.is_file() and item.name.endswith(_SHOWN):
            content = item.read_bytes()
            names = ("/", "/index.html") if item.name == "index.html" else (f"/{item.name}",)
            for path in names:
                app.add_api_route(path, _file(content, item.name), include_in_schema=False)
                paths.add(path)
    return frozenset(paths)


def _file(content: bytes, name: str) -> Callable[[], Awaitable[Response]]:
    kind = media_type(name)

    async def serve() -> Response:
        return Response(content, media_type=kind, headers={"x-content-type-options": "nosniff"})

    return serve


def media_type(name: str) -> str:
    """Content type by file name."""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    if kind.startswith("text/") or kind in ("application/javascript", "application/json"):
        return f"{kind}; charset=utf-8"
    return kind


def _add_folder(app: FastAPI, folder: Path) -> None:
    root = folder.resolve()
    if not root.is_dir():
        raise UsageError(f"--path {folder}: there is no such folder")

    async def serve(request: Request) -> Response:
        return FileResponse(found := find(root, request.url.path), media_type=media_type(found.name))

    app.add_api_route("/{path:path}", serve, include_in_schema=False)


def find(root: Path, path: str) -> Path:
    """The file of `root` that a URL path names (a folder's index.html); ApiError 404 if there is none inside."""
    if "\0" in path or "\\" in path:
        raise ApiError(404, "File Not Found")
    try:
        found = (root / path.lstrip("/")).resolve()
        if found.is_dir():
            found = found / "index.html"
        inside = found.is_relative_to(root) and found.resolve().is_relative_to(root)
        if inside and found.is_file():
            return found
    except OSError:
        pass
    raise ApiError(404, "File Not Found")
