"""Embeddings and reranking: llama-server's native forms, OpenAI's, and those of Jina, Cohere and TEI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import rerank as documents
from ikcli.server.http.answer import CLIENT_GONE, json_response
from ikcli.server.http.errors import bad_request
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.schema import field, schema_of, shown_as
from ikcli.server.http.vectors import (
    FloatRows,
    VectorBody,
    best_first,
    check_embeds,
    encoded,
    json_array,
    json_bytes,
    numbers,
    read_texts,
    vectors,
    with_array,
)

router = APIRouter(tags=["embeddings"])

_Texts = Annotated[Any, shown_as()]


class EmbeddingsBody(VectorBody, frozen=True):
    """Request body of the embedding routes."""

    input: _Texts = field(None, "a text, token ids, or an array of these")
    content: _Texts = field(None, "as input; the answer is that of /embedding")
    encoding_format: Literal["float", "base64"] = field("float", "numbers, or base64 of little-endian float32")


_EMBED, _RERANK = object_body(schema_of(EmbeddingsBody)), object_body(schema_of(documents.RerankBody))


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
    body = EmbeddingsBody.checked(await read_object(request))
    check_embeds(state)
    name, value = ("content", body.content) if body.input is None else ("input", body.input)
    if value is None:
        raise bad_request("input or content must be provided")
    openai = openai and name == "input"
    pooled = state.engine.model.pooling != "none"
    if openai and not pooled:
        raise bad_request("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    options = body.options(state)
    texts, _ = await read_texts(state, value, name)
    found = await vectors(request, state, body.lora, texts)
    if found is None:
        return Response(status_code=CLIENT_GONE)

    def shape(i: int, rows: FloatRows) -> dict[str, Any]:
        rows = options.of(rows) if pooled else rows
        if not openai:
            return {"index": i, "embedding": [numbers(row) for row in rows]}
        return {"object": "embedding", "index": i, "embedding": encoded(rows[0], body.encoding_format)}

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
    documents.check_ranks(state)
    body = documents.RerankBody.checked(await read_object(request))
    tei = body.documents is None and body.texts is not None
    texts = documents.read_documents(body.texts, "texts") if tei else documents.read_documents(body.documents)
    with_text = body.return_text if tei else body.return_documents
    found = await vectors(request, state, body.lora, await documents.prompts(state, body.query, texts))
    if found is None:
        return Response(status_code=CLIENT_GONE)
    scores = [float(str(rows[0, 0])) for rows in found.rows]
    order = best_first(scores)[: body.top_n]
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
