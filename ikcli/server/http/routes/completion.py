"""/completion and /v1/completions: text to continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http import infill
from ikcli.server.http.answer import answer
from ikcli.server.http.constraints import constraint_of
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generations import requests_of
from ikcli.server.http.openapi import generation_body
from ikcli.server.http.params import settings
from ikcli.server.http.prompts import Prompt, read_prompts
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.schema import GenerationBody
from ikcli.server.http.shapes.common import Probabilities, naming
from ikcli.server.http.shapes.completion import CompletionShape, Echo
from ikcli.server.http.shapes.native import NativeShape
from ikcli.server.http.state import ServerState

router = APIRouter(tags=["text"])


async def answer_native(
    request: Request, state: ServerState, body: dict[str, Any], prompts: Sequence[Prompt]
) -> Response:
    """Generate and answer in llama-server's own form."""
    top = body.get("logprobs")
    if top is not None and body.get("n_probs") is None:
        body = body | {"n_probs": (1 if top else 0) if isinstance(top, bool) else top}
    fields = GenerationBody.of(body, state.defaults, state.limits)
    constraint = await constraint_of(state, fields)
    generations = requests_of(state, fields, prompts, fields.n_cmpl, constraint=constraint)
    shown = [prompt.text for prompt in prompts for _ in range(fields.n_cmpl)]
    used = [settings(item, fields, state.engine.model.n_ctx_slot, state.alias) for item in generations]
    shape = NativeShape(
        naming(state.alias, body.get("model"), "cmpl-"), fields, probabilities(state, fields), shown, used,
        state.config.server.first_slot,
    )  # fmt: skip
    return await answer(request, state, generations, shape, stream=fields.stream, ping=fields.sse_ping_interval)


def probabilities(state: ServerState, fields: GenerationBody, top: int | None = None) -> Probabilities | None:
    """The writer of token probabilities, if the request wants them."""
    if fields.n_probs <= 0:
        return None
    return Probabilities(state.engine.tokenizer, post=fields.post_sampling_probs, top=top)


@router.post("/completion", openapi_extra=generation_body("prompt"), summary="Continue a text")
@router.post("/completions", openapi_extra=generation_body("prompt"), summary="Continue a text")
async def completion(request: Request) -> Response:
    """llama-server's own completion; several prompts give an array."""
    state = server(request)
    body = await read_object(request)
    prompts, _ = await read_prompts(body.get("prompt"), state.limits)
    return await answer_native(request, state, body, prompts)


@router.post("/v1/completions", openapi_extra=generation_body("prompt"), summary="Continue a text (OpenAI)")
async def completion_openai(request: Request) -> Response:
    """OpenAI's text completion with echo, logprobs, n and best_of."""
    state = server(request)
    body = await read_object(request)
    if body.get("prompt") is None:
        raise bad_request("prompt is required")
    n_top = _logprobs(body)
    if n_top is not None and body.get("n_probs") is None:
        body["n_probs"] = max(n_top, 1)
    fields = GenerationBody.of(body, state.defaults, state.limits)
    best = _best_of(body, fields)
    echo = body.get("echo") is not None and f.boolean(body["echo"], "echo")
    if best > fields.n_cmpl and fields.n_probs == 0:
        fields = fields.model_copy(update={"n_probs": 1})
    prompts = await _prompts(state, body)
    constraint = await constraint_of(state, fields)
    wants = n_top is not None or body.get("n_probs") is not None
    more = {"constraint": constraint, "prompt_logprobs": echo and wants}
    generations = requests_of(state, fields, prompts, best, **more)
    names = naming(state.alias, body.get("model"), "cmpl-")
    shown = None
    if echo:
        repeated = [prompt for prompt in prompts for _ in range(best)]
        shown = Echo([p.text for p in repeated], [p.tokens[p.n_added :] for p in repeated])
    writer = probabilities(state, fields, n_top) if wants else None
    shape = CompletionShape(names, fields, writer, shown, best)
    return await answer(request, state, generations, shape, stream=fields.stream, ping=fields.sse_ping_interval)


def _logprobs(body: dict[str, Any]) -> int | None:
    """OpenAI's `logprobs`: how many tokens besides the chosen one; None if it was not asked for."""
    value = body.get("logprobs")
    if value is None or value is False:
        return None
    if value is True:
        return 1
    number = f.integer(value, "logprobs")
    if not 0 <= number <= 1000:
        raise bad_request(f"logprobs must be from 0 to 1000, not {number}")
    return number


def _best_of(body: dict[str, Any], fields: GenerationBody) -> int:
    value = body.get("best_of")
    if value is None:
        return fields.n_cmpl
    best = f.checked(value, "int", "best_of", 1, 64)
    if best < fields.n_cmpl:
        raise bad_request(f"best_of must be at least n, which is {fields.n_cmpl}")
    if best > fields.n_cmpl and fields.stream:
        raise bad_request("best_of cannot be used with stream")
    return int(best)


async def _prompts(state: ServerState, body: dict[str, Any]) -> list[Prompt]:
    """The prompts; with `suffix` each is a text to fill in before it."""
    suffix = body.get("suffix")
    if suffix is None or f.text(suffix, "suffix") == "":
        return (await read_prompts(body["prompt"], state.limits))[0]
    value = body["prompt"]
    texts = value if isinstance(value, list) else [value]
    return [
        await infill.prompt_of(state, {"input_prefix": f.text(text, "prompt"), "input_suffix": suffix})
        for text in texts
    ]
