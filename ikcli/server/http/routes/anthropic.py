"""/v1/messages: Anthropic's Messages API and its token counting."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http.answer import answer_chat, json_response
from ikcli.server.http.bodies import AnthropicBody
from ikcli.server.http.dialects import anthropic as convert
from ikcli.server.http.generations import generations_of, one_generation_of
from ikcli.server.http.openapi import generation_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.shapes.anthropic import AnthropicShape
from ikcli.server.http.shapes.common import naming

router = APIRouter(tags=["chat"])

_BODY = generation_body(AnthropicBody)


@router.post("/v1/messages", openapi_extra=_BODY, summary="Answer a conversation (Anthropic)")
async def messages(request: Request) -> Response:
    """Answer a Messages request, whole or as events."""
    state = server(request)
    body, images = await read_object(request), state.images()
    fields, prepared, requests = await one_generation_of(state, convert.to_chat(body, images), images)
    names = naming(state.alias, body.get("model"), "msg_")
    shape = AnthropicShape(names, prepared.make_parser)
    return await answer_chat(request, state, requests, shape, fields, names.id, prepared.control)


@router.post("/v1/messages/count_tokens", openapi_extra=_BODY, summary="Tokens of a conversation (Anthropic)")
async def count_tokens(request: Request) -> Response:
    """Return the number of prompt tokens as `{"input_tokens": n}`."""
    state = server(request)
    images = state.images()
    _, prepared, _ = await generations_of(state, convert.to_chat(await read_object(request), images), images)
    return json_response({"input_tokens": len(prepared.tokens)})
