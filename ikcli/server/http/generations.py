"""From request bodies to engine requests, for the HTTP routes and for a console with its own engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ikcli.chat.images import Images
from ikcli.server.http.bans import bans_of
from ikcli.server.http.bodies import ChatBody
from ikcli.server.http.chat import PreparedChat, prepare
from ikcli.server.http.constraints import compiled
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.prompts import Prompt
from ikcli.server.http.state import ServerState
from ikcli.server.slots.messages import GenerationRequest, Speculation

MAX_GENERATIONS = 1024
"""Maximum number of generations that one request may start."""
_SAME = ("stop", "cache_prompt", "id_slot", "n_keep", "n_discard", "n_indent", "lora")


def requests_of(
    state: ServerState, fields: GenerationBody, prompts: Sequence[Prompt], per_prompt: int, **more: Any
) -> list[GenerationRequest]:
    """Return one engine request per prompt and answer; the answers to one prompt take consecutive seeds."""
    if len(prompts) * per_prompt > MAX_GENERATIONS:
        raise bad_request(f"the request asks for more than {MAX_GENERATIONS} answers")
    first = request_of(state, fields, **more)
    sampling = first.sampling
    samplings = [sampling]
    for i in range(1, per_prompt):
        samplings.append(sampling if sampling.random_seed else replace(sampling, seed=(sampling.seed + i) % 0xFFFFFFFF))
    return [
        replace(first, prompt=prompt.tokens, pictures=prompt.pictures, sampling=one)
        for prompt in prompts
        for one in samplings
    ]


def request_of(state: ServerState, fields: GenerationBody, **more: Any) -> GenerationRequest:
    """Return an engine request without a prompt; `more` overrides the fields.

    The request's limit never exceeds the server's (-n). -2 (until the context is full) counts as lower than -1 (no
    limit).
    """
    limits = (fields.n_predict, state.defaults.n_predict)
    same = {name: getattr(fields, name) for name in _SAME}
    values: dict[str, Any] = {"keep_special": state.config.chat.special} | same | more
    return GenerationRequest(
        prompt=(),
        sampling=fields.sampler_params(),
        n_predict=min([n for n in limits if n >= 0] or limits),
        within_context=-2 in limits,
        t_max_predict_ms=max(fields.t_max_predict_ms, 0),
        bans=bans_of(fields),
        speculation=Speculation(fields.speculative_n_max, fields.speculative_n_min, fields.speculative_p_min),
        report_progress=fields.return_progress and fields.stream,
        **values,
    )


async def generations_of(
    state: ServerState, body: dict[str, Any], images: Images | None = None
) -> tuple[ChatBody, PreparedChat, list[GenerationRequest]]:
    """Return the fields, the prepared chat and the engine requests; `images` as for `prepare`."""
    fields = ChatBody.of(body, state.defaults, state.limits)
    prepared = await prepare(state, with_defaults(state, body), fields, images)
    constraint = None if prepared.spec is None else await compiled(state, prepared.spec)
    more = {
        "stop": tuple(dict.fromkeys((*fields.stop, *prepared.stops))),
        "constraint": prepared.limited(state.engine.tokenizer, constraint),
        "keep_special": prepared.keep_special or state.config.chat.special,
        "turns": prepared.turns,
    }
    return fields, prepared, requests_of(state, fields, [prepared.prompt], fields.n_cmpl, **more)


async def one_generation_of(
    state: ServerState, body: dict[str, Any], images: Images | None = None
) -> tuple[ChatBody, PreparedChat, list[GenerationRequest]]:
    """Run `generations_of` for an API whose requests have a single answer."""
    fields, prepared, requests = await generations_of(state, body, images)
    if fields.n_cmpl != 1:
        raise bad_request("n must be 1")
    return fields, prepared, requests


def with_defaults(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with the server's grammar or schema, unless the body itself constrains the answer."""
    if any(body.get(name) for name in ("grammar", "json_schema", "response_format", "tools")):
        return body
    if state.defaults.grammar:
        return body | {"grammar": state.defaults.grammar}
    if state.defaults.json_schema is not None:
        return body | {"json_schema": state.defaults.json_schema}
    return body
