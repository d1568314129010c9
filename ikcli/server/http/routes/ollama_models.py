"""Model requests of Ollama's clients: lists, details, and management requests, which this server refuses."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli import __version__
from ikcli.gguf.constants import file_type_label
from ikcli.server.http import sse
from ikcli.server.http.answer import json_response
from ikcli.server.http.dialects.ollama import OllamaBody
from ikcli.server.http.errors import ApiError, bad_request, unsupported
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_json, read_object, server
from ikcli.server.http.routes.info import reads_images
from ikcli.server.http.schema import schema_of
from ikcli.server.http.state import ServerState

router = APIRouter(tags=["Ollama"])

_NAME = object_body(schema_of(OllamaBody))
_NEVER = "9999-12-31T23:59:59Z"


def asked_model(state: ServerState, body: OllamaBody) -> str:
    """Return the model name in a request.

    Raise ApiError 400 without a name, 404 if it differs from the server's (`NAME:latest` means NAME).
    """
    if not body.model:
        raise bad_request("model is required")
    if body.model not in state.names and body.model.removesuffix(":latest") not in state.names:
        raise ApiError(404, f"model '{body.model[:100]}' not found; this server has {', '.join(state.names)}")
    return body.model


@router.get("/api/version", summary="Version (Ollama)")
async def version(request: Request) -> Response:
    """Return the version, which some clients poll."""
    return json_response({"version": __version__})


@router.get("/api/tags", summary="The model (Ollama)")
async def tags(request: Request) -> Response:
    """Return a list of one model; its sizes are 0 while it loads."""
    return json_response({"models": [entry(server(request))]})


@router.get("/api/ps", summary="The loaded model (Ollama)")
async def ps(request: Request) -> Response:
    """Return the one model as running; it stays loaded as long as the server runs."""
    state = server(request)
    model = state.engine.model
    more = {"expires_at": _NEVER, "size_vram": model.size_gpu, "context_length": model.n_ctx_slot}
    return json_response({"models": [entry(state) | more]})


@router.post("/api/show", openapi_extra=_NAME, summary="About the model (Ollama)")
async def show(request: Request) -> Response:
    """Return sizes, template and capabilities."""
    state = server(request)
    asked_model(state, OllamaBody.checked(await read_object(request)))
    model = state.engine.model
    info = model_info(model.arch, model.n_params, model.n_ctx_slot, model.n_embd)
    return json_response(
        {
            "template": state.chat.describe()["chat_template"],
            "model_info": info,
            "modelfile": "",
            "parameters": "",
            "modified_at": _started(state),
            "details": _details(state),
            "capabilities": _capabilities(state),
        }
    )


def model_info(arch: str, n_params: int, n_ctx: int, n_embd: int) -> dict[str, Any]:
    """Return `model_info` of a model.

    Some clients read the context length under llama's key, whatever the architecture.
    """
    return {
        "general.architecture": arch,
        "general.parameter_count": n_params,
        f"{arch}.context_length": n_ctx,
        "llama.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
    }


def entry(state: ServerState) -> dict[str, Any]:
    """Return the model's entry in lists; its sizes are 0 while it loads."""
    return {
        "name": state.alias,
        "model": state.alias,
        "modified_at": _started(state),
        "size": state.engine.model.size if state.ready else 0,
        "digest": hashlib.sha256(state.alias.encode()).hexdigest(),
        "details": _details(state),
    }


def _started(state: ServerState) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.started))


def _details(state: ServerState) -> dict[str, Any]:
    arch = state.engine.model.arch if state.ready else ""
    n_params = state.engine.model.n_params if state.ready else 0
    ftype = state.engine.model.metadata.get("general.file_type") if state.ready else None
    return details(arch, n_params, file_type_label(int(ftype)) if ftype is not None else "")


def details(arch: str, n_params: int, file_type: str) -> dict[str, Any]:
    """Return `details` of a model."""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": arch,
        "families": [arch],
        "parameter_size": f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.1f}M",
        "quantization_level": file_type,
    }


def _capabilities(state: ServerState) -> list[str]:
    ids = state.engine.tokenizer.special_ids
    insert = None not in (ids.fim_pre, ids.fim_suf, ids.fim_mid)
    model = state.engine.model
    writes = {"completion": True, "tools": state.chat.takes_tools, "insert": insert, "thinking": state.chat.thinks}
    found = {name: there and model.generates for name, there in writes.items()}
    found["vision"] = reads_images(state) and model.generates
    found["embedding"] = model.pooling not in ("", "rank")
    return [name for name, there in found.items() if there]


@router.post("/api/pull", openapi_extra=_NAME, summary="Get a model (Ollama)")
async def pull(request: Request) -> Response:
    """Return success for the served model, 501 for others."""
    state = server(request)
    body = OllamaBody.checked(await read_object(request))
    try:
        asked_model(state, body)
    except ApiError as e:
        if e.status != 404:
            raise
        raise unsupported(f"{e.message}. This server gets no models; start it with -m FILE") from None
    done = {"status": "success"}
    return Response(sse.line(done), media_type=sse.JSON_LINES) if body.stream else json_response(done)


@router.post("/api/create", openapi_extra=_NAME, summary="Create a model (Ollama)")
@router.post("/api/copy", openapi_extra=_NAME, summary="Copy a model (Ollama)")
@router.post("/api/push", openapi_extra=_NAME, summary="Publish a model (Ollama)")
@router.delete("/api/delete", openapi_extra=_NAME, summary="Delete a model (Ollama)")
async def manage(request: Request) -> Response:
    """Return 501: models are files named when the server starts."""
    await read_json(request)
    what = request.url.path.rpartition("/")[2]
    raise unsupported(f"This server does not {what} models; its models are GGUF files, named when it is started")
