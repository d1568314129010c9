"""/api/embed and /api/embeddings: Ollama's text embeddings."""

from __future__ import annotations

import time
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import CLIENT_GONE, json_response
from ikcli.server.http.dialects.ollama import OllamaBody, keep_alive
from ikcli.server.http.errors import bad_request
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.routes.ollama_models import asked_model
from ikcli.server.http.schema import Flag, Text, field, schema_of, shown_as
from ikcli.server.http.state import ServerState
from ikcli.server.http.vectors import (
    Texts,
    VectorBody,
    check_embeds,
    json_array,
    numbers,
    read_texts,
    vectors,
    with_array,
)

router = APIRouter(tags=["Ollama"])
B = TypeVar("B", bound=OllamaBody)


class OllamaEmbedBody(OllamaBody, VectorBody, frozen=True):
    """Request body of /api/embed."""

    input: Annotated[Any, shown_as()] = field(None, "a text or an array of texts")
    truncate: Flag = field(True, "cut texts that are too long; default true")


class OllamaEmbeddingsBody(OllamaBody, frozen=True):
    """Request body of /api/embeddings."""

    prompt: Text = field("", "a text")
    lora: Annotated[Any, shown_as(type="array", items={"type": "object"})] = field(None, "scales of adapters")


_EMBED, _EMBEDDINGS = (object_body(schema_of(body)) for body in (OllamaEmbedBody, OllamaEmbeddingsBody))


@router.post("/api/embed", openapi_extra=_EMBED, summary="Embeddings (Ollama)")
async def embed(request: Request) -> Response:
    """Return normalized vectors of one text or several."""
    start = time.perf_counter()
    state, body, model = await _asked(request, OllamaEmbedBody)
    texts: Texts = ()
    if body.input not in (None, "", []):
        items = body.input if isinstance(body.input, list) else [body.input]
        texts, _ = await read_texts(state, [f.text(x, f"input[{i}]") for i, x in enumerate(items)], "input")
    if body.truncate:
        texts = _cut(state, texts)
    options, n_tokens, embeddings = body.options(state), 0, b"[]"
    if texts:
        found = await vectors(request, state, body.lora, texts)
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
    state, body, _ = await _asked(request, OllamaEmbeddingsBody)
    if not body.prompt:
        return json_response({"embedding": []})
    texts, _ = await read_texts(state, body.prompt, "prompt")
    found = await vectors(request, state, body.lora, _cut(state, texts))
    if found is None:
        return Response(status_code=CLIENT_GONE)
    return json_response({"embedding": numbers(found.rows[0][0])})


async def _asked(request: Request, kind: type[B]) -> tuple[ServerState, B, str]:
    state = server(request)
    body = kind.checked(await read_object(request))
    model = asked_model(state, body)
    keep_alive(body.keep_alive)
    check_embeds(state)
    if state.engine.model.pooling == "none":
        raise bad_request("Pooling type 'none' gives no vector of a text. Please use a different pooling type")
    return state, body, model


def _cut(state: ServerState, texts: Texts) -> Texts:
    """Truncate long texts to the context, keeping the end token that the model adds."""
    n_ctx, n_end = state.engine.model.n_ctx_slot, int(state.engine.tokenizer.add_eos)
    return tuple(t if len(t) <= n_ctx else t[: n_ctx - n_end] + t[len(t) - n_end :] for t in texts)
