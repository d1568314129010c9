"""A request body to what the engine needs: sampler parameters and options, checked against the model.

`Defaults` are the server's settings (command line); `parse` reads every field of ikcli.server.http.fields once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ikcli.errors import UsageError
from ikcli.sampling.params import SamplerParams, check_params, sampler_names
from ikcli.server.http import fields as f
from ikcli.server.http.adapters import scales_json, scales_of
from ikcli.server.http.bans import bans_of, server_bans
from ikcli.server.http.errors import bad_request
from ikcli.server.slots.messages import Bans, Speculation
from ikcli.settings.run import RunConfig
from ikcli.text_files import read_text
from ikcli.tokenizer import Tokenizer

MAX_STOPS = 1024
"""Stop and banned texts of one request."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets for fields it does not set."""

    sampling: SamplerParams = field(default_factory=SamplerParams)
    n_predict: int = -1
    n_keep: int = 0
    cache_prompt: bool = True
    sse_ping_interval: int = 30
    stop: tuple[str, ...] = ()
    bans: Bans = field(default_factory=Bans)
    grammar: str = ""
    json_schema: Any = None
    keep_special: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """Everything of a request that is not sampling. `json_schema` None: no schema (a schema may be false)."""

    n_predict: int = -1
    within_context: bool = False
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    n_cmpl: int = 1
    n_keep: int = 0
    n_discard: int = 0
    n_indent: int = 0
    t_max_predict_ms: int = 0
    cache_prompt: bool = True
    id_slot: int = -1
    grammar: str = ""
    json_schema: Any = None
    bans: Bans = field(default_factory=Bans)
    lora: tuple[float, ...] | None = None
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    response_fields: tuple[str, ...] = ()
    sse_ping_interval: int = 30
    speculation: Speculation = field(default_factory=Speculation)
    keep_special: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    tokenizer: Tokenizer
    n_vocab: int
    n_slots: int
    n_adapters: int = 0
    first_slot: int = 0

    def slot(self, number: int) -> int:
        """The index of a slot by its number, -1 for any; ApiError 400 if there is none."""
        if number < 0:
            return -1
        index, last = number - self.first_slot, self.first_slot + self.n_slots - 1
        if not 0 <= index < self.n_slots:
            raise bad_request(f"id_slot is {number}, but the slots are {self.first_slot} to {last}")
        return index


def defaults_of(config: RunConfig) -> Defaults:
    """The defaults that the command line asks for; UsageError if they make no sense."""
    given = config.sampling
    names = {item.name for item in f.FIELDS if item.sampling}
    values: dict[str, Any] = {name: getattr(given, name) for name in names if hasattr(given, name)}
    values |= {"temperature": given.temp, "tfs_z": given.tfs, "typical_p": given.typical, "seed": config.seed}
    if given.dry_sequence_breakers:
        texts = given.dry_sequence_breakers
        values["dry_sequence_breakers"] = () if texts == ("none",) else texts
    if given.samplers:
        values["samplers"] = sampler_names(given.samplers.split(";"))
    elif given.sampler_seq:
        values["samplers"] = sampler_names(given.sampler_seq)
    sampling = SamplerParams(**values, logit_bias=tuple(_bias_option(text) for text in given.logit_bias))
    check_params(sampling)
    return Defaults(
        sampling=sampling,
        n_predict=config.n_predict,
        n_keep=config.prompt.keep,
        cache_prompt=config.server.cache_prompt,
        sse_ping_interval=config.server.sse_ping_interval,
        stop=config.prompt.reverse_prompt,
        bans=server_bans(config),
        grammar=option_text(config.sampling.grammar, config.sampling.grammar_file, "grammar"),
        json_schema=_schema_option(option_text(given.json_schema, given.json_schema_file, "JSON schema")),
        keep_special=config.chat.special,
    )


def _bias_option(text: str) -> tuple[int, float]:
    at = max(text.rfind("+"), text.rfind("-"))
    try:
        return int(text[:at]), float(text[at:])
    except ValueError:
        raise UsageError(f"--logit-bias {text}: expected a token id and a signed number, as in 15043+1") from None


def option_text(text: str, path: Path | None, what: str) -> str:
    """A text given on the command line, or what the file given instead holds."""
    return text if path is None else read_text(path, what)


def _schema_option(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as e:
        raise UsageError(f"--json-schema is not JSON: {e}") from None


def parse(body: Mapping[str, Any], defaults: Defaults, limits: Limits) -> tuple[SamplerParams, Options]:
    """Read all generation fields of a body; ApiError naming the field that is wrong."""
    source = dict(body)
    values = {item.name: value for item in f.FIELDS if (value := f.read_field(item, source)) is not None}
    return _sampling(values, defaults, limits), _options(values, defaults, limits)


def _sampling(values: dict[str, Any], defaults: Defaults, limits: Limits) -> SamplerParams:
    changes = {item.name: values[item.name] for item in f.FIELDS if item.sampling and item.name in values}
    if "seed" in changes:
        seed = changes["seed"] & 0xFFFFFFFF
        changes["seed"] = -1 if seed == 0xFFFFFFFF else seed
    if changes.get("dry_base", 1.0) < 1.0:
        changes["dry_base"] = defaults.sampling.dry_base
    if changes.get("n_probs", 0) > limits.n_vocab:
        raise bad_request(f"n_probs must be at most {limits.n_vocab}, the size of the vocabulary")
    if "dry_sequence_breakers" in values:
        changes["dry_sequence_breakers"] = _breakers(values["dry_sequence_breakers"])
    if "logit_bias" in values:
        changes["logit_bias"] = read_logit_bias(values["logit_bias"], limits)
    if "penalty_prompt" in values:
        changes["penalty_prompt"] = _penalty_prompt(values["penalty_prompt"], limits)
    try:
        if "samplers" in values:
            changes["samplers"] = _samplers(values["samplers"])
        params = replace(defaults.sampling, **changes)
        check_params(params)
    except UsageError as e:
        raise bad_request(str(e)) from None
    return params


def _samplers(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return sampler_names(value.split(";") if ";" in value else value)
    return sampler_names(f.text(name, f"samplers[{i}]") for i, name in enumerate(f.array(value, "samplers")))


def _breakers(value: tuple[str, ...]) -> tuple[str, ...]:
    """Some clients send the array as text, as other servers want it."""
    if len(value) == 1 and value[0].lstrip().startswith("["):
        try:
            parsed = json.loads(value[0])
        except ValueError:
            parsed = None
        if isinstance(parsed, list):
            value = f.texts(parsed, "dry_sequence_breakers")
    if not value:
        raise bad_request("dry_sequence_breakers must be a non-empty array of strings")
    return value


def _penalty_prompt(value: Any, limits: Limits) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(limits.tokenizer.encode(value, add_special=False))
    return tuple(
        token_id(item, f"penalty_prompt[{i}]", limits.n_vocab)
        for i, item in enumerate(f.array(value, "penalty_prompt"))
    )


def token_id(value: Any, name: str, n_vocab: int) -> int:
    """A token id of the vocabulary; ApiError 400 otherwise."""
    token = f.integer(value, name)
    if not 0 <= token < n_vocab:
        raise bad_request(f"{name} is {token}, but the vocabulary has tokens 0 to {n_vocab - 1}")
    return token


def read_logit_bias(value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias from any of the accepted forms."""
    if isinstance(value, dict):
        pairs: list[tuple[Any, Any, str]] = [(_key(key), bias, f'logit_bias["{key}"]') for key, bias in value.items()]
    else:
        pairs = [(*_pair(item, i), f"logit_bias[{i}]") for i, item in enumerate(f.array(value, "logit_bias"))]
    out: dict[int, float] = {}
    for token, bias, name in pairs:
        number = -math.inf if bias is False else f.real(bias, name)
        if isinstance(token, str):
            for found in limits.tokenizer.encode(token, add_special=False):
                out[found] = number
        else:
            out[token_id(token, name, limits.n_vocab)] = number
    return tuple(out.items())


def _key(key: str) -> int | str:
    try:
        return int(key)
    except ValueError:
        return key


def _pair(item: Any, i: int) -> tuple[Any, Any]:
    if isinstance(item, dict) and "token" in item and "bias" in item:
        return item["token"], item["bias"]
    if not isinstance(item, list) or len(item) != 2:
        raise bad_request(f"logit_bias[{i}] must be a pair [token, bias]")
    return item[0], item[1]


_PLAIN = ("stream", "n_cmpl", "n_discard", "n_indent", "return_tokens", "return_progress", "timings_per_token",
          "response_fields")  # fmt: skip


def _options(values: dict[str, Any], defaults: Defaults, limits: Limits) -> Options:
    lora = scales_of(values["lora"], "lora", limits.n_adapters) if "lora" in values else None
    options = {name: values[name] for name in _PLAIN if name in values}
    stream_options = f.table(values.get("stream_options", {}), "stream_options")
    include = stream_options.get("include_usage")
    stop = values.get("stop", ()) or defaults.stop
    bans = bans_of(values, defaults.bans)
    if len(stop) > MAX_STOPS or len(bans.strings) + len(bans.patterns) > MAX_STOPS:
        raise bad_request(f"stop and banned texts may have at most {MAX_STOPS} entries")
    grammar, schema = _constraint(values, defaults)
    return Options(
        **options,
        n_predict=_n_predict(values, defaults),
        within_context=-2 in (values.get("n_predict"), defaults.n_predict),
        n_keep=values.get("n_keep", defaults.n_keep),
        t_max_predict_ms=max(values.get("t_max_predict_ms", 0), 0),
        cache_prompt=values.get("cache_prompt", defaults.cache_prompt),
        sse_ping_interval=values.get("sse_ping_interval", defaults.sse_ping_interval),
        include_usage=include is not None and f.boolean(include, "stream_options.include_usage"),
        id_slot=limits.slot(values.get("id_slot", -1)),
        stop=stop,
        bans=bans,
        lora=lora,
        grammar=grammar,
        json_schema=schema,
        keep_special=defaults.keep_special,
        speculation=Speculation(*(values.get(f"speculative.{name}") for name in ("n_max", "n_min", "p_min"))),
    )


def _n_predict(values: dict[str, Any], defaults: Defaults) -> int:
    """The request's limit, never above the server's (-n). -2, until the context is full, is below -1, no limit."""
    both = (int(values.get("n_predict", -1)), defaults.n_predict)
    return min([n for n in both if n >= 0] or both)


def _constraint(values: dict[str, Any], defaults: Defaults) -> tuple[str, Any]:
    grammar, schema = values.get("grammar", ""), values.get("json_schema")
    if grammar and schema is not None:
        raise bad_request("grammar and json_schema cannot be used together")
    if schema is not None and not isinstance(schema, dict | bool):
        raise bad_request(f"json_schema must be an object, not {f.shown(schema)}")
    if not grammar and schema is None:
        return defaults.grammar, defaults.json_schema
    return grammar, schema


def settings(sampling: SamplerParams, options: Options, n_ctx: int, model: str) -> dict[str, Any]:
    """`generation_settings`: the names of both forks."""
    seed = 0xFFFFFFFF if sampling.random_seed else sampling.seed
    out: dict[str, Any] = {"n_ctx": n_ctx, "n_predict": options.n_predict, "model": model, "seed": seed}
    for item in f.FIELDS:
        if item.sampling and item.name != "seed":
            out[item.name] = getattr(sampling, item.name)
    window = {name: n_ctx for name in ("repeat_last_n", "dry_penalty_last_n") if getattr(sampling, name) < 0}
    spec = options.speculation
    return out | window | {
        "penalty_prompt_tokens": list(sampling.penalty_prompt or ()),
        "use_penalty_prompt_tokens": sampling.penalty_prompt is not None,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "stop": list(options.stop),
        "max_tokens": options.n_predict,
        "n_keep": options.n_keep,
        "n_discard": options.n_discard,
        "n_indent": options.n_indent,
        "stream": options.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "grammar": options.grammar,
        "json_schema": options.json_schema,
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
        "timings_per_token": options.timings_per_token,
        "return_tokens": options.return_tokens,
        "cache_prompt": options.cache_prompt,
        "lora": scales_json(options.lora or ()),
    }  # fmt: skip
