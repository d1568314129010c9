"""/v1/responses: OpenAI's Responses API, without stored conversations."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http.answer import answer_chat, json_response
from ikcli.server.http.bodies import ResponsesBody
from ikcli.server.http.dialects import responses as convert
from ikcli.server.http.dialects.responses_tools import ClientTools
from ikcli.server.http.generations import generations_of, one_generation_of
from ikcli.server.http.openapi import generation_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.shapes.common import naming
from ikcli.server.http.shapes.responses import ResponsesShape

router = APIRouter(tags=["chat"])

_BODY = generation_body(ResponsesBody)


@router.post("/v1/responses", openapi_extra=_BODY, summary="Answer a conversation (OpenAI Responses)")
@router.post("/responses", openapi_extra=_BODY, summary="Answer a conversation (OpenAI Responses)")
async def responses(request: Request) -> Response:
    """Answer an OpenAI Responses request, whole or as events."""
    state = server(request)
    body, images = await read_object(request), state.images()
    fields, prepared, requests = await one_generation_of(state, convert.to_chat(body, images), images)
    names = naming(state.alias, body.get("model"), "resp_")
    shape = ResponsesShape(names, fields, convert.echoed(body), ClientTools(body), prepared.make_parser)
    return await answer_chat(request, state, requests, shape, fields, names.id, prepared.control)


@router.post("/v1/responses/input_tokens", openapi_extra=_BODY, summary="Tokens of a conversation")
@router.post("/responses/input_tokens", openapi_extra=_BODY, summary="Tokens of a conversation")
async def input_tokens(request: Request) -> Response:
    """Return the number of prompt tokens."""
    state = server(request)
    images = state.images()
    _, prepared, _ = await generations_of(state, convert.to_chat(await read_object(request), images), images)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prepared.tokens)})
