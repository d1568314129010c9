"""Request defaults from the command line, and the settings that answers report."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from ikcli.errors import UsageError
from ikcli.sampling.params import check_params, sampler_names
from ikcli.server.http.adapters import scales_json
from ikcli.server.http.bans import server_bans
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.slots.messages import GenerationRequest
from ikcli.settings.run import RunConfig
from ikcli.settings.sampling import SamplingValues, sampling_values
from ikcli.text_files import read_text


def defaults_of(config: RunConfig) -> GenerationBody:
    """Return the defaults of requests. Raise UsageError if the command line is invalid."""
    given = config.sampling
    values: dict[str, Any] = {item.name: getattr(given, item.name) for item in fields(SamplingValues)}
    if given.dry_sequence_breakers:
        texts = given.dry_sequence_breakers
        values["dry_sequence_breakers"] = () if texts == ("none",) else texts
    if given.samplers:
        values["samplers"] = sampler_names(given.samplers.split(";"))
    elif given.sampler_seq:
        values["samplers"] = sampler_names(given.sampler_seq)
    found = GenerationBody.model_construct(
        **values,
        seed=config.seed,
        logit_bias=tuple(_bias_option(text) for text in given.logit_bias),
        n_predict=config.n_predict,
        n_keep=config.prompt.keep,
        cache_prompt=config.server.cache_prompt,
        sse_ping_interval=config.server.sse_ping_interval,
        stop=config.prompt.reverse_prompt,
        banned_strings=server_bans(config),
        banned_n=config.server.banned_n,
        grammar=option_text(given.grammar, given.grammar_file, "grammar"),
        json_schema=_schema_option(option_text(given.json_schema, given.json_schema_file, "JSON schema")),
    )
    check_params(found.sampler_params())
    return found


def _bias_option(text: str) -> tuple[int, float]:
    at = max(text.rfind("+"), text.rfind("-"))
    try:
        return int(text[:at]), float(text[at:])
    except ValueError:
        raise UsageError(f"--logit-bias {text}: expected a token id and a signed number, as in 15043+1") from None


def option_text(text: str, path: Path | None, what: str) -> str:
    """Return a text given on the command line, or the content of the file given instead."""
    return text if path is None else read_text(path, what)


def _schema_option(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as e:
        raise UsageError(f"--json-schema is not JSON: {e}") from None


def settings(request: GenerationRequest, fields: GenerationBody, n_ctx: int, model: str) -> dict[str, Any]:
    """Return `generation_settings` with the names of both forks."""
    sampling, spec = request.sampling, request.speculation
    seed = 0xFFFFFFFF if sampling.random_seed else sampling.seed
    out: dict[str, Any] = {"n_ctx": n_ctx, "n_predict": request.n_predict, "model": model, "seed": seed}
    out |= {item.name: getattr(sampling, item.name) for item, _ in sampling_values()}
    window = {name: n_ctx for name in ("repeat_last_n", "dry_penalty_last_n") if getattr(sampling, name) < 0}
    return out | window | {
        "penalty_prompt_tokens": list(sampling.penalty_prompt or ()),
        "use_penalty_prompt_tokens": sampling.penalty_prompt is not None,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "stop": list(request.stop),
        "max_tokens": request.n_predict,
        "n_keep": request.n_keep,
        "n_discard": request.n_discard,
        "n_indent": request.n_indent,
        "stream": fields.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "grammar": fields.grammar,
        "json_schema": fields.json_schema,
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "samplers": list(sampling.samplers),
        "speculative.n_max": spec.n_max,
        "speculative.n_min": spec.n_min,
        "speculative.p_min": spec.p_min,
        "timings_per_token": fields.timings_per_token,
        "return_tokens": fields.return_tokens,
        "cache_prompt": request.cache_prompt,
        "lora": scales_json(request.lora or ()),
    }  # fmt: skip
