"""Reading request bodies: size and time limits, JSON objects, content types."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ikcli.server.http import jsontext
from ikcli.server.http.errors import ApiError, bad_request

MAX_BODY = 128 << 20
"""Maximum size of a request body in bytes; conversations with images are large."""


async def read_body(request: Request, timeout: float = 600.0) -> bytes:
    """Read the whole body. Raise ApiError 413 if it is too large, 408 if it takes longer than `timeout` seconds."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large()
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout or None):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise _too_large()
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {timeout:g} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away before the end of its request") from None
    return b"".join(parts)


async def read_json(request: Request, timeout: float = 600.0) -> Any:
    """Read the body as JSON. Raise ApiError 400 if it is invalid, 415 if it is a form or multipart body instead."""
    data = await read_body(request, timeout)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        raise ApiError(415, f"content type {kind} is not supported; send application/json")
    if not data.strip():
        raise bad_request("the request has no body; send a JSON object")
    try:
        return jsontext.parse(data)
    except ValueError as e:
        raise bad_request(str(e)) from None


async def read_object(request: Request, timeout: float = 600.0) -> dict[str, Any]:
    """Read the body as a JSON object. Raise ApiError 400 if it is anything else."""
    value = await read_json(request, timeout)
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _too_large() -> ApiError:
    return ApiError(413, f"the request body has more than {MAX_BODY} bytes")
