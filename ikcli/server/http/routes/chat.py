"""/v1/chat/completions, /apply-template and token counts: conversations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http.answer import answer, json_response
from ikcli.server.http.chat import PreparedChat, prepare
from ikcli.server.http.generations import generations_of, with_defaults
from ikcli.server.http.openapi import generation_body
from ikcli.server.http.params import parse
from ikcli.server.http.routes.completion import probabilities
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.shapes.chat import ChatShape
from ikcli.server.http.shapes.common import naming
from ikcli.server.http.state import ServerState

router = APIRouter(tags=["chat"])

_BODY = generation_body(
    "messages",
    extra={
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": {"description": "auto, none, required, or a function"},
        "parallel_tool_calls": {"type": ["boolean", "null"]},
        "response_format": {"description": "text, json_object (with schema) or json_schema"},
        "chat_template_kwargs": {"type": ["object", "null"], "description": "variables for the chat template"},
        "reasoning_format": {"type": ["string", "null"]},
        "reasoning_effort": {"type": ["string", "null"]},
        "reasoning_budget_tokens": {"type": ["integer", "null"]},
        "add_generation_prompt": {"type": ["boolean", "null"]},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"]},
    },
)


@router.post("/v1/chat/completions", openapi_extra=_BODY, summary="Answer a conversation (OpenAI)")
@router.post("/chat/completions", openapi_extra=_BODY, summary="Answer a conversation (OpenAI)")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completion, with tools, JSON schemas and all fields of /completion."""
    state = server(request)
    body = await read_object(request)
    options, prepared, requests, n_top = await generations_of(state, body)
    writer = probabilities(state, requests[0].sampling, n_top)
    shape = ChatShape(naming(state.alias, body.get("model"), "chatcmpl-"), options, writer, prepared.make_parser)
    return await answer(request, state, requests, shape, stream=options.stream, ping=options.sse_ping_interval)


@router.post("/apply-template", openapi_extra=_BODY, summary="The prompt of a conversation")
async def apply_template(request: Request) -> Response:
    """`{"prompt": ...}` without generating."""
    state = server(request)
    body = await read_object(request)
    prepared = await _only_prompt(state, body)
    return json_response({"prompt": prepared.text})


@router.post("/v1/chat/completions/input_tokens", openapi_extra=_BODY, summary="Tokens of a conversation")
@router.post("/chat/completions/input_tokens", openapi_extra=_BODY, summary="Tokens of a conversation")
async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt has."""
    state = server(request)
    prepared = await _only_prompt(state, await read_object(request))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prepared.tokens)})


async def _only_prompt(state: ServerState, body: dict[str, Any]) -> PreparedChat:
    parse(body, state.defaults, state.limits)
    return await prepare(state, with_defaults(state, body))
