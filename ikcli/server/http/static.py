"""Static files: the web page at `/`, or the user's folder with `--path`. Files outside that folder are never served."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ikcli.errors import UsageError
from ikcli.log import notice_once
from ikcli.server.http.errors import ApiError
from ikcli.server.http.jsontext import dump_bytes
from ikcli.server.http.page_settings import FILE, page_settings
from ikcli.server.http.routes.web import add_page
from ikcli.settings.server import ServerConfig


def add_routes(app: FastAPI, config: ServerConfig) -> frozenset[str]:
    """Serve the page or the folder; return the paths that are open without a key."""
    if config.path is not None:
        _add_folder(app, config.path)
        return frozenset()
    if not config.ui or config.webui == "none":
        return frozenset()
    _add_settings(app, config)
    return add_page(app, config.api_prefix)


def _add_settings(app: FastAPI, config: ServerConfig) -> None:
    """Add the page's initial settings; they need the key because prompts may be among them."""
    settings, unknown = page_settings(config)
    if unknown:
        notice_once(f"the web page has no setting {', '.join(unknown)}; --ui-config goes without")
    content = dump_bytes(settings)

    async def serve() -> Response:
        return Response(content, media_type=media_type(FILE), headers={"cache-control": "no-cache"})

    app.add_api_route(f"/{FILE}", serve, include_in_schema=False)


def media_type(name: str) -> str:
    """Return the content type for a file name."""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    if kind.startswith("text/") or kind in ("application/javascript", "application/json"):
        return f"{kind}; charset=utf-8"
    return kind


def _add_folder(app: FastAPI, folder: Path) -> None:
    root = folder.resolve()
    if not root.is_dir():
        raise UsageError(f"--path {folder}: the directory does not exist")

    async def serve(request: Request) -> Response:
        return FileResponse(found := find(root, request.url.path), media_type=media_type(found.name))

    app.add_api_route("/{path:path}", serve, include_in_schema=False)


def find(root: Path, path: str) -> Path:
    """Return the file of `root` that a URL path names (for a folder, its index.html).

    Raise ApiError 404 if there is none inside `root`.
    """
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
