"""/v1/chat/completions, /apply-template and token counts: conversations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import answer_chat, json_response
from ikcli.server.http.bodies import ChatBody
from ikcli.server.http.chat import PreparedChat, prepare
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generations import generations_of, with_defaults
from ikcli.server.http.openapi import generation_body, object_body
from ikcli.server.http.routes.completion import probabilities
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.shapes.chat import ChatShape
from ikcli.server.http.shapes.common import naming
from ikcli.server.http.state import ServerState

router = APIRouter(tags=["chat"])

_BODY = generation_body(ChatBody)
_CONTROL = object_body(
    {
        "type": "object",
        "required": ["id", "action"],
        "properties": {"id": {"type": "string"}, "action": {"type": "string", "enum": ["reasoning_end"]}},
    }
)


@router.post("/v1/chat/completions", openapi_extra=_BODY, summary="Answer a conversation (OpenAI)")
@router.post("/chat/completions", openapi_extra=_BODY, summary="Answer a conversation (OpenAI)")
async def chat_completions(request: Request) -> Response:
    """Answer an OpenAI chat completion request, with tools, JSON schemas and all fields of /completion."""
    state = server(request)
    body = await read_object(request)
    fields, prepared, requests = await generations_of(state, body)
    writer = probabilities(state, fields, fields.n_top)
    names = naming(state.alias, body.get("model"), "chatcmpl-")
    shape = ChatShape(names, fields, writer, prepared.make_parser)
    return await answer_chat(request, state, requests, shape, fields, names.id, prepared.control)


@router.post("/v1/chat/completions/control", openapi_extra=_CONTROL, summary="End the thinking of a running answer")
@router.post("/chat/completions/control", openapi_extra=_CONTROL, summary="End the thinking of a running answer")
async def control(request: Request) -> Response:
    """Return `{"success": true}`, or false and a `message` if no thinking can be ended."""
    state = server(request)
    body = await read_object(request)
    if not body.get("id"):
        raise bad_request("id is required: the id that the events of the answer have")
    id = f.text(body["id"], "id")
    if body.get("action") != "reasoning_end":
        raise bad_request(f"action must be reasoning_end, not {f.shown(body.get('action'))}")
    problem = state.running.end_thinking(id)
    return json_response({"success": False, "message": problem} if problem else {"success": True})


@router.post("/apply-template", openapi_extra=_BODY, summary="The prompt of a conversation")
async def apply_template(request: Request) -> Response:
    """Return `{"prompt": ...}` without generating."""
    state = server(request)
    body = await read_object(request)
    prepared = await _only_prompt(state, body)
    return json_response({"prompt": prepared.text})


@router.post("/v1/chat/completions/input_tokens", openapi_extra=_BODY, summary="Tokens of a conversation")
@router.post("/chat/completions/input_tokens", openapi_extra=_BODY, summary="Tokens of a conversation")
async def input_tokens(request: Request) -> Response:
    """Return the number of prompt tokens."""
    state = server(request)
    prepared = await _only_prompt(state, await read_object(request))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prepared.tokens)})


async def _only_prompt(state: ServerState, body: dict[str, Any]) -> PreparedChat:
    fields = ChatBody.of(body, state.defaults, state.limits)
    return await prepare(state, with_defaults(state, body), fields)
