"""/api/chat and /api/generate: Ollama's conversations and texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import convert_ollama as convert
from ikcli.server.http import fields as f
from ikcli.server.http import infill, sse
from ikcli.server.http.answer import answer, json_response
from ikcli.server.http.constraints import constraint_of
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.generations import generations_of, requests_of
from ikcli.server.http.limits import token_id
from ikcli.server.http.openapi import object_body
from ikcli.server.http.prompts import Prompt, read_prompts
from ikcli.server.http.routes.completion import probabilities
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.routes.ollama_models import asked_model
from ikcli.server.http.shapes.ollama import OllamaShape, loaded
from ikcli.server.http.state import ServerState
from ikcli.server.http.turns import image_text
from ikcli.server.slots.messages import GenerationRequest
from ikcli.server.slots.pictures import tokens_of

router = APIRouter(tags=["Ollama"])

_COMMON: dict[str, Any] = {
    "model": {"type": "string"},
    "stream": {"type": ["boolean", "null"], "description": "JSON lines; default true"},
    "options": {"type": ["object", "null"], "description": "num_predict, temperature, top_k, stop, seed and so on"},
    "format": {"description": "json, or a JSON schema"},
    "keep_alive": {"description": "seconds or a duration such as 5m"},
    "think": {"description": "true, false, low, medium or high"},
    "logprobs": {"type": ["boolean", "null"]},
    "top_logprobs": {"type": ["integer", "null"]},
}
_CHAT = {
    "messages": {"type": ["array", "null"], "items": {"type": "object"}},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
}
_GENERATE = {
    "prompt": {"type": ["string", "null"]},
    "suffix": {"type": ["string", "null"], "description": "fill in what is before this text"},
    "system": {"type": ["string", "null"]},
    "raw": {"type": ["boolean", "null"], "description": "take the prompt as it is, without a chat template"},
    "context": {"type": ["array", "null"], "items": {"type": "integer"}, "description": "that of the last answer"},
}


def _body(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return object_body({"type": "object", "required": required, "properties": _COMMON | properties})


@router.post("/api/chat", openapi_extra=_body(["model"], _CHAT), summary="Answer a conversation (Ollama)")
async def chat(request: Request) -> Response:
    """Answer an Ollama chat request; without messages nothing is generated."""
    state = server(request)
    body = await read_object(request)
    model = asked_model(state, body)
    images = state.images()
    converted = convert.to_chat(body, images)
    if not converted["messages"]:
        return json_response(loaded(model, True))
    _check_thinking(state, body, model)
    fields, prepared, requests = await generations_of(state, converted, images)
    writer = probabilities(state, fields, convert.n_top(body))
    shape = OllamaShape(model, prepared.make_parser, writer)
    return await answer(request, state, requests, shape, stream=fields.stream, media_type=sse.JSON_LINES)


@router.post("/api/generate", openapi_extra=_body(["model"], _GENERATE), summary="Continue or answer a text (Ollama)")
async def generate(request: Request) -> Response:
    """Answer an Ollama generate request: a single turn, or the unchanged text with `raw` or `suffix`."""
    state = server(request)
    body = await read_object(request)
    model = asked_model(state, body)
    if body.get("template"):
        raise bad_request("template is not supported; send raw prompts, or start the server with --chat-template")
    fields = convert.generation_fields(body)
    if not body.get("prompt") and not body.get("suffix") and not body.get("images"):
        return json_response(loaded(model, False))
    raw = body.get("raw") is not None and f.boolean(body["raw"], "raw")
    if raw or body.get("suffix"):
        shape, requests = await _raw(state, body, fields, model)
    else:
        shape, requests = await _turn(state, body, model)
    return await answer(request, state, requests, shape, stream=fields["stream"], media_type=sse.JSON_LINES)


async def _raw(
    state: ServerState, body: Mapping[str, Any], fields: dict[str, Any], model: str
) -> tuple[OllamaShape, list[GenerationRequest]]:
    given = GenerationBody.of(fields, state.defaults, state.limits)
    text, suffix = f.text(body.get("prompt") or "", "prompt"), f.text(body.get("suffix") or "", "suffix")
    sources = f.array(body.get("images") or [], "images")
    if sources:
        prompt = await _raw_with_images(state, text, suffix, sources)
    elif suffix:
        prompt = await infill.prompt_of(state, {"input_prefix": text, "input_suffix": suffix})
    else:
        prompt = (await read_prompts(text, state.limits))[0][0]
    constraint = await constraint_of(state, given)
    writer = probabilities(state, given, convert.n_top(body))
    requests = requests_of(state, given, [prompt], 1, constraint=constraint)
    return OllamaShape(model, None, writer, ()), requests


async def _raw_with_images(state: ServerState, text: str, suffix: str, sources: list[Any]) -> Prompt:
    """Return a raw prompt with images, which stand before the text."""
    images = state.images()
    markers = [image_text(source, f"images[{i}]", images) for i, source in enumerate(sources)]
    if suffix:
        raise bad_request("suffix cannot be used with images")
    assert state.pictures is not None  # without it, `image_text` raises
    return await state.pictures.prompt("".join(markers) + text, images)


async def _turn(state: ServerState, body: Mapping[str, Any], model: str) -> tuple[OllamaShape, list[GenerationRequest]]:
    _check_thinking(state, body, model)
    images = state.images()
    fields, prepared, requests = await generations_of(state, convert.to_turn(body, images), images)
    prompt = prepared.prompt
    if body.get("context"):
        before = f.array(body["context"], "context")
        ids = tuple(token_id(item, f"context[{i}]", state.limits.n_vocab) for i, item in enumerate(before))
        if prompt.pictures:
            raise bad_request("context cannot be used with images; send the conversation to /api/chat")
        tokens = prompt.tokens
        if tokens[0] == state.engine.tokenizer.bos_id:
            tokens = tokens[1:]
        prompt = Prompt(ids + tokens, prompt.text)
        requests = [replace(one, prompt=prompt.tokens, turns=()) for one in requests]
    writer = probabilities(state, fields, convert.n_top(body))
    return OllamaShape(model, prepared.make_parser, writer, tuple(tokens_of(prompt.tokens))), requests


def _check_thinking(state: ServerState, body: Mapping[str, Any], model: str) -> None:
    if body.get("think") and not state.chat.thinks:
        raise bad_request(f'"{model}" does not support thinking')
