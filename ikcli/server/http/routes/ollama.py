"""/api/chat and /api/generate: Ollama's conversations and texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import infill, sse
from ikcli.server.http.answer import answer, json_response
from ikcli.server.http.constraints import constraint_of
from ikcli.server.http.dialects import ollama as convert
from ikcli.server.http.dialects.ollama import OllamaChatBody, OllamaGenerateBody, OllamaGenerationBody
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.generations import generations_of, requests_of
from ikcli.server.http.limits import token_id
from ikcli.server.http.openapi import object_body
from ikcli.server.http.prompts import Prompt, read_prompts
from ikcli.server.http.routes.completion import probabilities
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.routes.ollama_models import asked_model
from ikcli.server.http.schema import schema_of
from ikcli.server.http.shapes.ollama import OllamaShape, loaded
from ikcli.server.http.state import ServerState
from ikcli.server.http.turns import image_text
from ikcli.server.slots.messages import GenerationRequest
from ikcli.server.slots.pictures import tokens_of

router = APIRouter(tags=["Ollama"])

_CHAT, _GENERATE = (object_body(schema_of(body)) for body in (OllamaChatBody, OllamaGenerateBody))


@router.post("/api/chat", openapi_extra=_CHAT, summary="Answer a conversation (Ollama)")
async def chat(request: Request) -> Response:
    """Answer an Ollama chat request; without messages nothing is generated."""
    state = server(request)
    body = OllamaChatBody.checked(await read_object(request))
    model = asked_model(state, body)
    images = state.images()
    converted = convert.to_chat(body, images)
    if not converted["messages"]:
        return json_response(loaded(model, True))
    _check_thinking(state, body, model)
    fields, prepared, requests = await generations_of(state, converted, images)
    writer = probabilities(state, fields, body.n_top)
    shape = OllamaShape(model, prepared.make_parser, writer)
    return await answer(request, state, requests, shape, stream=fields.stream, media_type=sse.JSON_LINES)


@router.post(
    "/api/generate",
    openapi_extra=_GENERATE,
    summary="Continue or answer a text (Ollama)",
)
async def generate(request: Request) -> Response:
    """Answer an Ollama generate request: a single turn, or the unchanged text with `raw` or `suffix`."""
    state = server(request)
    body = OllamaGenerateBody.checked(await read_object(request))
    model = asked_model(state, body)
    if body.template:
        raise bad_request("template is not supported; send raw prompts, or start the server with --chat-template")
    fields = convert.generation_fields(body)
    if not (body.prompt or body.suffix or body.images):
        return json_response(loaded(model, False))
    if body.raw or body.suffix:
        shape, requests = await _raw(state, body, fields, model)
    else:
        shape, requests = await _turn(state, body, model)
    return await answer(request, state, requests, shape, stream=fields["stream"], media_type=sse.JSON_LINES)


async def _raw(
    state: ServerState, body: OllamaGenerateBody, fields: dict[str, Any], model: str
) -> tuple[OllamaShape, list[GenerationRequest]]:
    given = GenerationBody.of(fields, state.defaults, state.limits)
    if body.images:
        prompt = await _raw_with_images(state, body)
    elif body.suffix:
        prompt = await infill.prompt_of(state, {"input_prefix": body.prompt, "input_suffix": body.suffix})
    else:
        prompt = (await read_prompts(body.prompt, state.limits))[0][0]
    constraint = await constraint_of(state, given)
    writer = probabilities(state, given, body.n_top)
    requests = requests_of(state, given, [prompt], 1, constraint=constraint)
    return OllamaShape(model, None, writer, ()), requests


async def _raw_with_images(state: ServerState, body: OllamaGenerateBody) -> Prompt:
    """Return a raw prompt with images, which stand before the text."""
    images = state.images()
    markers = [image_text(source, f"images[{i}]", images) for i, source in enumerate(body.images)]
    if body.suffix:
        raise bad_request("suffix cannot be used with images")
    assert state.pictures is not None  # without it, `image_text` raises
    return await state.pictures.prompt("".join(markers) + body.prompt, images)


async def _turn(
    state: ServerState, body: OllamaGenerateBody, model: str
) -> tuple[OllamaShape, list[GenerationRequest]]:
    _check_thinking(state, body, model)
    images = state.images()
    fields, prepared, requests = await generations_of(state, convert.to_turn(body, images), images)
    prompt = prepared.prompt
    if body.context:
        ids = tuple(token_id(item, f"context[{i}]", state.limits.n_vocab) for i, item in enumerate(body.context))
        if prompt.pictures:
            raise bad_request("context cannot be used with images; send the conversation to /api/chat")
        tokens = prompt.tokens
        if tokens[0] == state.engine.tokenizer.bos_id:
            tokens = tokens[1:]
        prompt = Prompt(ids + tokens, prompt.text)
        requests = [replace(one, prompt=prompt.tokens, turns=()) for one in requests]
    writer = probabilities(state, fields, body.n_top)
    return OllamaShape(model, prepared.make_parser, writer, tuple(tokens_of(prompt.tokens))), requests


def _check_thinking(state: ServerState, body: OllamaGenerationBody, model: str) -> None:
    if body.think and not state.chat.thinks:
        raise bad_request(f'"{model}" does not support thinking')
