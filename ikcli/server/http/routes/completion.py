"""/completion and /v1/completions: text to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http import infill
from ikcli.server.http.answer import answer
from ikcli.server.http.bodies import CompletionBody, NativeBody, OpenAICompletionBody
from ikcli.server.http.constraints import constraint_of
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.generations import requests_of
from ikcli.server.http.openapi import generation_body
from ikcli.server.http.params import settings
from ikcli.server.http.prompts import Prompt, read_prompts
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.shapes.common import Probabilities, naming
from ikcli.server.http.shapes.completion import CompletionShape, Echo
from ikcli.server.http.shapes.native import NativeShape
from ikcli.server.http.state import ServerState

router = APIRouter(tags=["text"])


async def answer_native(
    request: Request, state: ServerState, body: Mapping[str, Any], fields: CompletionBody, prompts: Sequence[Prompt]
) -> Response:
    """Generate and answer in llama-server's native form."""
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
    """Return the writer of token probabilities if the request wants them, else None."""
    if fields.n_probs <= 0:
        return None
    return Probabilities(state.engine.tokenizer, post=fields.post_sampling_probs, top=top)


@router.post("/completion", openapi_extra=generation_body(NativeBody), summary="Continue a text")
@router.post("/completions", openapi_extra=generation_body(NativeBody), summary="Continue a text")
async def completion(request: Request) -> Response:
    """Answer llama-server's native completion request; several prompts give an array."""
    state = server(request)
    body = await read_object(request)
    fields = NativeBody.of(body, state.defaults, state.limits)
    prompts, _ = await read_prompts(fields.prompt, state.limits, images=state.image_prompts)
    return await answer_native(request, state, body, fields, prompts)


@router.post("/v1/completions", openapi_extra=generation_body(OpenAICompletionBody), summary="Continue a text (OpenAI)")
async def completion_openai(request: Request) -> Response:
    """Answer an OpenAI text completion request, with echo, logprobs, n and best_of."""
    state = server(request)
    body = await read_object(request)
    fields = OpenAICompletionBody.of(body, state.defaults, state.limits)
    best, echo = _best_of(fields), fields.echo
    if best > fields.n_cmpl and fields.n_probs == 0:
        fields = fields.model_copy(update={"n_probs": 1})
    prompts = await _prompts(state, fields)
    constraint = await constraint_of(state, fields)
    wants = fields.logprobs is not None or body.get("n_probs") is not None
    more = {"constraint": constraint, "prompt_logprobs": echo and wants}
    if echo and wants and any(prompt.pictures for prompt in prompts):
        raise bad_request("echo with logprobs is not possible for prompts with images")
    generations = requests_of(state, fields, prompts, best, **more)
    names = naming(state.alias, body.get("model"), "cmpl-")
    shown = None
    if echo:
        repeated = [prompt for prompt in prompts for _ in range(best)]
        shown = Echo([p.text for p in repeated], [p.tokens[p.n_added :] for p in repeated])
    writer = probabilities(state, fields, fields.logprobs) if wants else None
    shape = CompletionShape(names, fields, writer, shown, best)
    return await answer(request, state, generations, shape, stream=fields.stream, ping=fields.sse_ping_interval)


def _best_of(fields: OpenAICompletionBody) -> int:
    best = fields.n_cmpl if fields.best_of is None else fields.best_of
    if best < fields.n_cmpl:
        raise bad_request(f"best_of must be at least n, which is {fields.n_cmpl}")
    if best > fields.n_cmpl and fields.stream:
        raise bad_request("best_of cannot be used with stream")
    return best


async def _prompts(state: ServerState, fields: OpenAICompletionBody) -> list[Prompt]:
    """Return the prompts; with `suffix`, each becomes a fill-in-the-middle prompt."""
    value, suffix = fields.prompt, fields.suffix
    if not suffix:
        return (await read_prompts(value, state.limits, images=state.image_prompts))[0]
    texts = value if isinstance(value, list) else [value]
    return [
        await infill.prompt_of(state, {"input_prefix": f.text(text, "prompt"), "input_suffix": suffix})
        for text in texts
    ]
