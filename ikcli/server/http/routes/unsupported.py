"""Endpoints for what this server has not: embeddings, reranking, adapters, control vectors. Clear answers for each."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.errors import bad_request, unsupported
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_json, server

router = APIRouter(tags=["not available"])

_ANY = object_body({"type": "object"})
_LIST = object_body({"type": "array", "items": {"type": "object"}})


@router.post("/embedding", openapi_extra=_ANY, summary="Embeddings")
@router.post("/embeddings", openapi_extra=_ANY, summary="Embeddings")
@router.post("/v1/embeddings", openapi_extra=_ANY, summary="Embeddings (OpenAI)")
async def embeddings(request: Request) -> Response:
    """501: models here compute logits only."""
    await read_json(request)
    if server(request).config.server.embeddings:
        raise unsupported("This server does not support embeddings: its models compute logits, no hidden states")
    raise unsupported("This server does not support embeddings. Use a server for embedding models")


@router.post("/rerank", openapi_extra=_ANY, summary="Reranking")
@router.post("/reranking", openapi_extra=_ANY, summary="Reranking")
@router.post("/v1/rerank", openapi_extra=_ANY, summary="Reranking")
@router.post("/v1/reranking", openapi_extra=_ANY, summary="Reranking")
async def rerank(request: Request) -> Response:
    """501: the model is no reranker."""
    await read_json(request)
    raise unsupported("This server does not support reranking. Use a server for reranking models")


@router.get("/lora-adapters", summary="Adapters")
async def adapters(request: Request) -> Response:
    """Always empty: adapters cannot be loaded."""
    return json_response([])


@router.post("/lora-adapters", openapi_extra=_LIST, summary="Scales of adapters")
async def scale_adapters(request: Request) -> Response:
    """An empty list is the only valid one."""
    for i, item in enumerate(f.array(await read_json(request), "the body")):
        entry = f.table(item, f"[{i}]")
        for key in ("id", "scale"):
            if entry.get(key) is None:
                raise bad_request(f"[{i}].{key} is required")
        f.integer(entry["id"], f"[{i}].id")
        f.real(entry["scale"], f"[{i}].scale")
        raise bad_request(f"[{i}].id: invalid adapter id {entry['id']}, no adapter is loaded")
    return json_response({"success": True})


@router.get("/control-vectors", summary="Control vectors")
async def vectors(request: Request) -> Response:
    """Always empty."""
    return json_response([])


@router.post("/control-vectors/load", openapi_extra=_ANY, summary="Load a control vector")
@router.post("/control-vectors/unload", openapi_extra=_ANY, summary="Unload a control vector")
@router.post("/control-vectors/apply", openapi_extra=_LIST, summary="Scales of control vectors")
async def change_vectors(request: Request) -> Response:
    """501."""
    await read_json(request)
    raise unsupported("This server does not support control vectors")
