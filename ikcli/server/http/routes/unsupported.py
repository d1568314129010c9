"""Endpoints for what this server has not: other control vectors. Clear answers for each."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http.answer import json_response
from ikcli.server.http.errors import unsupported
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_json

router = APIRouter(tags=["not available"])

_ANY = object_body({"type": "object"})
_LIST = object_body({"type": "array", "items": {"type": "object"}})


@router.get("/control-vectors", summary="Control vectors")
async def vectors(request: Request) -> Response:
    """Always empty: those of the command line do not change."""
    return json_response([])


@router.post("/control-vectors/load", openapi_extra=_ANY, summary="Load a control vector")
@router.post("/control-vectors/unload", openapi_extra=_ANY, summary="Unload a control vector")
@router.post("/control-vectors/apply", openapi_extra=_LIST, summary="Scales of control vectors")
async def change_vectors(request: Request) -> Response:
    """501."""
    await read_json(request)
    raise unsupported("Control vectors do not change while this server runs. Start it with --control-vector FILE")
