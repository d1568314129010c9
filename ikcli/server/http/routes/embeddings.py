"""Embeddings and reranking: llama-server's native forms, OpenAI's, and those of Jina, Cohere and TEI."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http import rerank as documents
from ikcli.server.http.answer import CLIENT_GONE, json_response
from ikcli.server.http.errors import bad_request
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.vectors import (
    FloatRows,
    best_first,
    check_embeds,
    encoded,
    encoding,
    json_array,
    json_bytes,
    numbers,
    read_options,
    read_texts,
    vectors,
    with_array,
)
from ikcli.settings.sampling import INT32

router = APIRouter(tags=["embeddings"])

_EMBED = object_body(
    {
        "type": "object",
        "properties": {
            "model": {"type": "string"},
            "input": {"description": "a text, token ids, or an array of these"},
            "content": {"description": "as input; the answer is that of /embedding"},
            "encoding_format": {"type": "string", "enum": ["float", "base64"]},
            "dimensions": {"type": "integer", "description": "numbers that are left of a vector, normalized again"},
            "embd_normalize": {"type": "integer", "description": "-1 none, 0 int16, 1 taxicab, 2 euclidean, p-norm"},
            "lora": {"type": "array", "items": {"type": "object"}},
        },
    }
)
_RERANK = object_body(
    {
        "type": "object",
        "required": ["query"],
        "properties": {
            "model": {"type": "string"},
            "query": {"type": "string"},
            "documents": {"type": "array", "description": "texts, or objects with a field text"},
            "texts": {"type": "array", "description": "as documents; the answer is that of TEI"},
            "top_n": {"type": "integer"},
            "return_documents": {"type": "boolean"},
            "return_text": {"type": "boolean"},
        },
    }
)


@router.post("/embedding", openapi_extra=_EMBED, summary="Embeddings")
@router.post("/embeddings", openapi_extra=_EMBED, summary="Embeddings")
async def embeddings(request: Request) -> Response:
    """Return an array with `index` and `embedding`: one row, or one row per token without pooling."""
    return await _embeddings(request, openai=False)


@router.post("/v1/embeddings", openapi_extra=_EMBED, summary="Embeddings (OpenAI)")
async def embeddings_openai(request: Request) -> Response:
    """Return OpenAI's answer, or that of /embeddings if the request has `content`."""
    return await _embeddings(request, openai=True)


async def _embeddings(request: Request, *, openai: bool) -> Response:
    state = server(request)
    body = await read_object(request)
    check_embeds(state)
    name = "input" if body.get("input") is not None else "content"
    if body.get(name) is None:
        raise bad_request("input or content must be provided")
    openai = openai and name == "input"
    pooled = state.engine.model.pooling != "none"
    if openai and not pooled:
        raise bad_request("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    form, options = encoding(body), read_options(state, body)
    texts, _ = await read_texts(state, body[name], name)
    found = await vectors(request, state, body, texts)
    if found is None:
        return Response(status_code=CLIENT_GONE)

    def shape(i: int, rows: FloatRows) -> dict[str, Any]:
        rows = options.of(rows) if pooled else rows
        if not openai:
            return {"index": i, "embedding": [numbers(row) for row in rows]}
        return {"object": "embedding", "index": i, "embedding": encoded(rows[0], form)}

    data = await json_array(found.rows, shape)
    if not openai:
        return json_bytes(data)
    usage = {"prompt_tokens": found.timings.prompt_n, "total_tokens": found.timings.prompt_n}
    return with_array({"object": "list", "model": state.alias, "usage": usage}, "data", data)


@router.post("/rerank", openapi_extra=_RERANK, summary="Rank documents by a query")
@router.post("/reranking", openapi_extra=_RERANK, summary="Rank documents by a query")
@router.post("/v1/rerank", openapi_extra=_RERANK, summary="Rank documents by a query")
@router.post("/v1/reranking", openapi_extra=_RERANK, summary="Rank documents by a query")
async def rerank(request: Request) -> Response:
    """Return scores, best first: `results` with `index` and `relevance_score`, or TEI's array for `texts`."""
    state = server(request)
    body = await read_object(request)
    documents.check_ranks(state)
    query = f.text(body.get("query"), "query")
    tei = body.get("documents") is None and body.get("texts") is not None
    texts = documents.read_documents(body, "texts" if tei else "documents")
    top_n = body.get("top_n")
    n = len(texts) if top_n is None else f.integer(top_n, "top_n", 1, INT32)
    flag = "return_text" if tei else "return_documents"
    with_text = body.get(flag) is not None and f.boolean(body[flag], flag)
    found = await vectors(request, state, body, await documents.prompts(state, query, texts))
    if found is None:
        return Response(status_code=CLIENT_GONE)
    scores = [float(str(rows[0, 0])) for rows in found.rows]
    order = best_first(scores)[:n]
    if tei:
        return json_response(
            [{"index": i, "score": scores[i]} | ({"text": texts[i]} if with_text else {}) for i in order]
        )
    results = [
        {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if with_text else {})
        for i in order
    ]
    usage = {"prompt_tokens": found.timings.prompt_n, "total_tokens": found.timings.prompt_n}
    return json_response({"object": "list", "model": state.alias, "results": results, "usage": usage})
