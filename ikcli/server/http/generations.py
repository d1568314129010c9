"""Request bodies to what the engine is asked for: for the HTTP routes, and for a console with its own engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ikcli.sampling.params import SamplerParams
from ikcli.server.http import fields as f
from ikcli.server.http.chat import PreparedChat, prepare
from ikcli.server.http.constraints import compiled
from ikcli.server.http.errors import bad_request
from ikcli.server.http.params import Options, parse
from ikcli.server.http.prompts import Prompt
from ikcli.server.http.state import ServerState
from ikcli.server.slots.messages import GenerationRequest

MAX_GENERATIONS = 1024
"""Generations that one request may start."""


def requests_of(
    prompts: Sequence[Prompt], per_prompt: int, sampling: SamplerParams, options: Options, **more: Any
) -> list[GenerationRequest]:
    """One engine request per prompt and answer; the answers to one prompt take seeds in a row."""
    if len(prompts) * per_prompt > MAX_GENERATIONS:
        raise bad_request(f"the request asks for more than {MAX_GENERATIONS} answers")
    base: dict[str, Any] = {
        "n_predict": options.n_predict,
        "within_context": options.within_context,
        "stop": options.stop,
        "cache_prompt": options.cache_prompt,
        "id_slot": options.id_slot,
        "n_keep": options.n_keep,
        "n_discard": options.n_discard,
        "n_indent": options.n_indent,
        "t_max_predict_ms": options.t_max_predict_ms,
        "bans": options.bans,
        "lora": options.lora,
        "speculation": options.speculation,
        "keep_special": options.keep_special,
        "report_progress": options.return_progress and options.stream,
    }
    samplings = [sampling]
    for i in range(1, per_prompt):
        samplings.append(sampling if sampling.random_seed else replace(sampling, seed=(sampling.seed + i) % 0xFFFFFFFF))
    return [
        GenerationRequest(prompt=prompt.tokens, sampling=one, **(base | more))
        for prompt in prompts
        for one in samplings
    ]


async def generations_of(
    state: ServerState, body: dict[str, Any]
) -> tuple[Options, PreparedChat, list[GenerationRequest], int | None]:
    """Options, the prepared chat, the engine requests, and how many top log-probabilities to return."""
    n_top = top_logprobs(body)
    if n_top is not None and body.get("n_probs") is None:
        body = body | {"n_probs": max(n_top, 1)}
    sampling, options = parse(body, state.defaults, state.limits)
    prepared = await prepare(state, with_defaults(state, body))
    constraint = None if prepared.spec is None else await compiled(state, prepared.spec)
    stop = tuple(dict.fromkeys((*options.stop, *prepared.stops)))
    prompt = Prompt(prepared.tokens, prepared.text)
    more = {
        "constraint": prepared.limited(state.engine.tokenizer, constraint),
        "keep_special": prepared.keep_special or options.keep_special,
        "turns": prepared.turns,
    }
    requests = requests_of([prompt], options.n_cmpl, sampling, replace(options, stop=stop), **more)
    return options, prepared, requests, n_top


async def one_generation_of(
    state: ServerState, body: dict[str, Any]
) -> tuple[Options, PreparedChat, list[GenerationRequest]]:
    """`generations_of` for an API whose requests have one answer."""
    options, prepared, requests, _ = await generations_of(state, body)
    if options.n_cmpl != 1:
        raise bad_request("n must be 1")
    return options, prepared, requests


def top_logprobs(body: dict[str, Any]) -> int | None:
    """How many tokens `logprobs` and `top_logprobs` ask for besides the chosen one; None if not asked."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is None or wanted is False:
        if top:
            raise bad_request("top_logprobs requires logprobs to be set to true")
        return None
    f.boolean(wanted, "logprobs")
    return 20 if top is None else int(f.checked(top, "int", "top_logprobs", 0, 1000))


def with_defaults(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """The body with the server's grammar or schema if it has nothing that shapes the answer itself."""
    if any(body.get(name) for name in ("grammar", "json_schema", "response_format", "tools")):
        return body
    if state.defaults.grammar:
        return body | {"grammar": state.defaults.grammar}
    if state.defaults.json_schema is not None:
        return body | {"json_schema": state.defaults.json_schema}
    return body
