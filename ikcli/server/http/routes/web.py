"""The web page: the files of ikcli/server/web, read once, with compressed copies, entity tags and a content policy."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from html import escape
from importlib import resources

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'self'; form-action 'none'; frame-ancestors 'self'"
    ),
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


def add_page(app: FastAPI, prefix: str = "") -> frozenset[str]:
    """Add a route for every file of the page, the page itself at `/`, and return their paths."""
    paths: set[str] = set()
    for item in resources.files("ikcli.server").joinpath("web").iterdir():
        kind = _KINDS.get(item.name[item.name.rfind(".") :])
        if kind is None:
            continue
        content = item.read_bytes()
        if item.name == "index.html":
            content = _with_base(content, prefix)
        for path in ("/", "/index.html") if item.name == "index.html" else (f"/{item.name}",):
            app.add_api_route(path, _file(content, kind), include_in_schema=False)
            paths.add(path)
    return frozenset(paths)


def _with_base(page: bytes, prefix: str) -> bytes:
    """Return the page with a base address.

    All addresses are relative, so `/prefix` without a trailing slash needs one.
    """
    name = prefix.strip("/")
    if not name:
        return page
    return page.replace(b"<head>", b'<head>\n<base href="/%s/">' % escape(name).encode(), 1)


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    packed = gzip.compress(content, mtime=0)
    headers = _HEADERS | {"etag": f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if headers["etag"] in (tag.strip() for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(packed, media_type=kind, headers=headers | {"content-encoding": "gzip"})
        return Response(content, media_type=kind, headers=headers)

    return serve


def _takes_gzip(accepted: str) -> bool:
    """Return whether a client accepts gzip: it names it without refusing it (`q=0`)."""
    for part in accepted.lower().split(","):
        name, *options = (text.strip() for text in part.split(";"))
        if name == "gzip":
            return not any(option.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for option in options)
    return False
