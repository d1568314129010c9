"""/lora-adapters: the LoRA adapters of the command line and their scales."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http.adapters import scales_of
from ikcli.server.http.answer import json_response
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_json, server

router = APIRouter(tags=["adapters"])

_ENTRY = {"type": "object", "properties": {"id": {"type": "integer"}, "scale": {"type": "number"}}}
_LIST = object_body({"type": "array", "items": _ENTRY})


@router.get("/lora-adapters", summary="Adapters")
async def adapters(request: Request) -> Response:
    """Return id, file and scale of every adapter."""
    engine = server(request).engine
    pairs = zip(engine.model.adapters, engine.scales, strict=True)
    return json_response([{"id": i, "path": path, "scale": scale} for i, (path, scale) in enumerate(pairs)])


@router.post("/lora-adapters", openapi_extra=_LIST, summary="Scales of adapters")
async def scale_adapters(request: Request) -> Response:
    """Set the scales of later requests that name none; adapters that the body does not name get 0."""
    state = server(request)
    state.engine.set_scales(scales_of(await read_json(request), "the body", state.limits.n_adapters))
    return json_response({"success": True})
