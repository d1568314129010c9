"""/control-vectors: listing, loading (from one folder), unloading and scaling control vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.errors import ApiError, bad_request, unsupported
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_json, read_object, server
from ikcli.server.http.routes.slots import file_name
from ikcli.server.slots.states import EngineError
from ikcli.server.slots.vectors import VectorChange

router = APIRouter(tags=["adapters"])

T = TypeVar("T")
_LAYERS = {"layer_start": {"type": "integer"}, "layer_end": {"type": "integer"}}
_FILE = {"path": {"type": "string"}, "scale": {"type": "number", "default": 1}} | _LAYERS
_ENTRY = {"id": {"type": "integer"}, "scale": {"type": "number"}} | _LAYERS
_LOAD = object_body({"type": "object", "properties": _FILE, "required": ["path"]})
_UNLOAD = object_body({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]})
_APPLY = object_body({"type": "array", "items": {"type": "object", "properties": _ENTRY}})


@router.get("/control-vectors", summary="Control vectors")
async def vectors(request: Request) -> Response:
    """Return id, file, scale and layers of every control vector, those of the command line first."""
    return json_response(
        [
            {
                "id": i,
                "path": item.name,
                "scale": item.use.scale,
                "layer_start": item.use.first,
                "layer_end": item.use.last,
                "applied": item.use.scale != 0,
            }
            for i, item in enumerate(server(request).engine.vectors.items)
        ]
    )


@router.post("/control-vectors/load", openapi_extra=_LOAD, summary="Load a control vector")
async def load(request: Request) -> Response:
    """Load a file of the folder for later requests; a vector already loaded gets the new settings."""
    folder, body = _folder(request), await read_object(request)
    scale = 1.0 if body.get("scale") is None else f.real(body["scale"], "scale")
    first, last = (_layer(body, name, name) for name in _LAYERS)
    name = _name(body.get("path"), folder)
    load = server(request).engine.vectors.load
    number = await _done(lambda: load(name, folder / name, scale, first, last))
    return json_response({"success": True, "id": number})


@router.post("/control-vectors/unload", openapi_extra=_UNLOAD, summary="Unload a control vector")
async def unload(request: Request) -> Response:
    """Unload a control vector; the numbers of those after it drop by one."""
    _folder(request)
    body = await read_object(request)
    if body.get("id") is None:
        raise bad_request("id is required")
    number = f.integer(body["id"], "id")
    await _done(lambda: server(request).engine.vectors.unload(number))
    return json_response({"success": True})


@router.post("/control-vectors/apply", openapi_extra=_APPLY, summary="Scales of control vectors")
async def apply(request: Request) -> Response:
    """Set scales, and optionally layers, for later requests; vectors that the body does not name get 0."""
    _folder(request)
    changes = []
    for i, item in enumerate(f.array(await read_json(request), "the body")):
        entry = f.table(item, f"the body[{i}]")
        for key in ("id", "scale"):
            if entry.get(key) is None:
                raise bad_request(f"the body[{i}].{key} is required")
        number, scale = f.integer(entry["id"], f"the body[{i}].id"), f.real(entry["scale"], f"the body[{i}].scale")
        changes.append(VectorChange(number, scale, *(_layer(entry, key, f"the body[{i}].{key}") for key in _LAYERS)))
    await _done(lambda: server(request).engine.vectors.apply(changes))
    return json_response({"success": True})


def _folder(request: Request) -> Path:
    folder = server(request).config.adapters.control_vector_path
    if folder is None:
        raise unsupported("Control vectors do not change while this server runs. Start it with `--control-vector-path`")
    return folder


def _layer(entry: dict[str, Any], key: str, name: str) -> int | None:
    return None if entry.get(key) is None else f.integer(entry[key], name)


def _name(value: Any, folder: Path) -> str:
    """Return the name of a file in the folder; the request may include the folder."""
    if isinstance(value, str) and Path(value).parent.resolve() == folder.resolve():
        value = Path(value).name
    name = file_name(value, "path")
    if (folder / name).resolve().parent != folder.resolve():
        raise bad_request("Invalid path: it leads out of the folder of control vectors")
    return name


async def _done(change: Callable[[], T]) -> T:
    """Return the result of a change; it runs in a thread because it may read a file."""
    try:
        return await asyncio.to_thread(change)
    except EngineError as e:
        raise ApiError(e.status, e.message, e.type) from None
