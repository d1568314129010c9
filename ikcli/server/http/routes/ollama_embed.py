"""/api/embed and /api/embeddings: Ollama's text embeddings."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import CLIENT_GONE, json_response
from ikcli.server.http.convert_ollama import keep_alive
from ikcli.server.http.errors import bad_request
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.routes.ollama_models import asked_model
from ikcli.server.http.state import ServerState
from ikcli.server.http.vectors import (
    Texts,
    check_embeds,
    json_array,
    numbers,
    read_options,
    read_texts,
    vectors,
    with_array,
)

router = APIRouter(tags=["Ollama"])

_COMMON: dict[str, Any] = {
    "model": {"type": "string"},
    "options": {"type": ["object", "null"]},
    "keep_alive": {"description": "seconds or a duration such as 5m"},
}
_EMBED = object_body(
    {
        "type": "object",
        "required": ["model"],
        "properties": _COMMON
        | {
            "input": {"description": "a text or an array of texts"},
            "truncate": {"type": ["boolean", "null"], "description": "cut texts that are too long; default true"},
            "dimensions": {"type": ["integer", "null"], "description": "numbers that are left of a vector"},
        },
    }
)
_EMBEDDINGS = object_body(
    {"type": "object", "required": ["model"], "properties": _COMMON | {"prompt": {"type": ["string", "null"]}}}
)


@router.post("/api/embed", openapi_extra=_EMBED, summary="Embeddings (Ollama)")
async def embed(request: Request) -> Response:
    """Return normalized vectors of one text or several."""
    start = time.perf_counter()
    state, body, model = await _asked(request)
    value = body.get("input")
    texts: Texts = ()
    if value not in (None, "", []):
        items = value if isinstance(value, list) else [value]
        texts, _ = await read_texts(state, [f.text(x, f"input[{i}]") for i, x in enumerate(items)], "input")
    if body.get("truncate") is None or f.boolean(body["truncate"], "truncate"):
        texts = _cut(state, texts)
    options, n_tokens, embeddings = read_options(state, body), 0, b"[]"
    if texts:
        found = await vectors(request, state, body, texts)
        if found is None:
            return Response(status_code=CLIENT_GONE)
        n_tokens = found.timings.prompt_n
        embeddings = await json_array(found.rows, lambda _, rows: numbers(options.of(rows)[0]))
    duration = int(1e9 * (time.perf_counter() - start))
    fields = {"model": model, "total_duration": duration, "load_duration": 0, "prompt_eval_count": n_tokens}
    return with_array(fields, "embeddings", embeddings)


@router.post("/api/embeddings", openapi_extra=_EMBEDDINGS, summary="An embedding (Ollama)")
async def embeddings(request: Request) -> Response:
    """Return the vector of one text, not normalized, as in Ollama."""
    state, body, _ = await _asked(request)
    text = f.text(body.get("prompt") or "", "prompt")
    if not text:
        return json_response({"embedding": []})
    texts, _ = await read_texts(state, text, "prompt")
    found = await vectors(request, state, body, _cut(state, texts))
    if found is None:
        return Response(status_code=CLIENT_GONE)
    return json_response({"embedding": numbers(found.rows[0][0])})


async def _asked(request: Request) -> tuple[ServerState, dict[str, Any], str]:
    state = server(request)
    body = await read_object(request)
    model = asked_model(state, body)
    keep_alive(body.get("keep_alive"))
    check_embeds(state)
    if state.engine.model.pooling == "none":
        raise bad_request("Pooling type 'none' gives no vector of a text. Please use a different pooling type")
    return state, body, model


def _cut(state: ServerState, texts: Texts) -> Texts:
    """Truncate long texts to the context, keeping the end token that the model adds."""
    n_ctx, n_end = state.engine.model.n_ctx_slot, int(state.engine.tokenizer.add_eos)
    return tuple(t if len(t) <= n_ctx else t[: n_ctx - n_end] + t[len(t) - n_end :] for t in texts)
