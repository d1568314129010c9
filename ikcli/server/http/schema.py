"""The fields of requests that generate, once: names, types, limits, defaults, help, and what they mean for a model.

`GenerationBody` is what a body is read into, what the OpenAPI document shows, and, filled from the command line, what
requests get for the fields they leave out. A field that is null has its default. Names are those of llama-server; where
its forks differ both spellings are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    AliasChoices,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ikcli.errors import UsageError
from ikcli.sampling.params import SamplerParams, sampler_names
from ikcli.server.http import fields as f
from ikcli.server.http.adapters import scales_of
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.limits import Limits, read_logit_bias, read_penalty_prompt
from ikcli.settings.sampling import INT32, SamplingValues, sampling_values

# fmt: off

NEVER = -999.0
"""The bias of a banned token that stands for minus infinity."""
MAX_STOPS = 1024
"""Stop and banned texts of one request."""
WITHOUT_EFFECT = frozenset({"n_cache_reuse", "backend_sampling", "verbose"})
"""Fields that are accepted from clients that send them, and change nothing."""


def _whole(value: Any) -> Any:
    """JSON numbers without fraction are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _single(value: float) -> float:
    if abs(value) > 3.4e38:
        raise PydanticCustomError("finite_number", "too large for a 32-bit number")
    return value


def _texts(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    return f.texts(value, str(info.field_name))


Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict(), BeforeValidator(_whole)]
Number = Annotated[float, Strict(), AllowInfNan(False), AfterValidator(_single)]
DraftLength = Annotated[int, Strict(), Ge(0), Le(INT32), BeforeValidator(_whole)]
Probability = Annotated[float, Strict(), Ge(0), Le(1), AllowInfNan(False)]
Text = Annotated[str, Strict()]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts, json_schema_input_type=str | list[str])]


def _json(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


def _field(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    names: str = "",
) -> Any:
    """A field; `names` are blank-separated spellings, of which the first in a request counts."""
    alias = AliasChoices(*names.split()) if names else None
    return Field(default, ge=low, gt=above, le=high, validation_alias=alias, description=help)


def _sampling_fields() -> dict[str, Any]:
    kinds = {bool: Flag, int: Whole, float: Number}
    found = {}
    for item, about in sampling_values():
        made = _field(item.default, about.help, low=about.low, high=about.high, above=about.above)
        found[item.name] = (kinds[type(item.default)], made)
    return found


if TYPE_CHECKING:

    class _SamplingBody(SamplingValues, BaseModel, frozen=True): ...

else:
    _SamplingBody = create_model("_SamplingBody", **_sampling_fields())


class StreamOptions(BaseModel, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: Flag | None = None


class GenerationBody(_SamplingBody, frozen=True):
    """See the module. Values are those that the engine takes: text has become tokens, numbers of slots are indices."""

    # what is generated
    n_predict: Whole = _field(-1,
        "most tokens to generate; -1 = no limit, -2 = until the context is full, 0 = evaluate the prompt only", low=-2,
        high=INT32, names="n_predict max_completion_tokens max_tokens")
    stream: Flag = _field(False, "send the answer in pieces as server-sent events")
    stream_options: Annotated[StreamOptions, _json(type="object")] = _field(StreamOptions(),
        "`include_usage`: send a last event with the token counts")
    stop: Texts = _field((), "texts that end the generation; they are not part of the answer")
    n_cmpl: Whole = _field(1, "answers per prompt", low=1, high=64, names="n_cmpl n")
    n_keep: Whole = _field(0, "prompt tokens kept when the context is full; -1 = all", low=-1, high=INT32)
    n_discard: Whole = _field(0, "tokens dropped when the context is full; 0 = half", low=0, high=INT32)
    n_indent: Whole = _field(0, "least indentation of generated lines", low=0, high=INT32)
    t_max_predict_ms: Whole = _field(0, "time limit in ms from the first token on, acting at line ends; 0 = none",
        low=-1)
    cache_prompt: Flag = _field(True, "reuse the part of the prompt that the slot holds already")
    id_slot: Whole = _field(-1, "slot to use; -1 = any", low=-1)
    grammar: Text = _field("", "GBNF grammar that the answer follows")
    json_schema: Annotated[Any, _json()] = _field(None, "JSON schema that the answer follows")
    # what may not appear
    banned_strings: Texts = _field((),
        "texts that may not appear in the answer, in any case; the server goes back and chooses another token")
    banned_regex: Texts = _field((), "regular expressions that may match nothing in the answer")
    banned_regex_case_insensitive: Texts = _field((), "as banned_regex, in any case")
    banned_n: Whole = _field(1, "tokens of a banned text that are banned where it began; -1 = all, 0 = none", low=-1,
        high=INT32)
    banned_bias: Number = _field(NEVER, "what is added to the logit of a banned token; -999 and below = never")
    banbuffer_size: Whole = _field(0, "tokens held back for banned_regex; 0 = as many as a pattern has characters",
        low=0, high=INT32)
    rewind_count_max: Whole = _field(-1,
        "how often in a row the server goes back, then the text stays; 0 = without limit, -1 = 20 or twice "
        "the number of bans", low=-1, high=INT32)
    saturate_predict: Flag = _field(False, "tokens taken back do not count for n_predict")
    # what is returned
    return_tokens: Flag = _field(False, "fill `tokens` with the generated token ids")
    return_progress: Flag = _field(False, "send `prompt_progress` events while a long prompt is computed")
    timings_per_token: Flag = _field(False, "`timings` in every event")
    response_fields: Texts = _field((), "return only these fields; a/b takes field b of a")
    sse_ping_interval: Whole = _field(30, "seconds of silence after which a stream gets a comment; -1 = never", low=-1,
        high=INT32)
    # sampling beside the numbers and switches
    seed: Whole = _field(-1, "random seed; -1 = random", low=-(2**63), high=2**64 - 1)
    dry_sequence_breakers: Texts = _field(SamplerParams().dry_sequence_breakers,
        "texts over which no repetition is seen; not empty")
    logit_bias: Annotated[Any, _json(type=["array", "object"])] = _field((),
        "add to logits: pairs [token id or text, bias] or an object; false = never")
    samplers: Annotated[Any, _json(type=["array", "string"])] = _field(SamplerParams().samplers,
        "samplers in order: names, or a string of letters")
    penalty_prompt: Annotated[Any, _json(type=["string", "array"])] = _field(None,
        "text or token ids looked at for penalties instead of the prompt")
    # drafting
    speculative_n_max: DraftLength | None = _field(None, "most tokens to draft", names="speculative.n_max")
    speculative_n_min: DraftLength | None = _field(None, "fewest tokens worth a draft", names="speculative.n_min")
    speculative_p_min: Probability | None = _field(None, "least probability of a drafted token",
        names="speculative.p_min")
    # adapters
    lora: Annotated[Any, _json(type="array", items={"type": "object"})] = _field(None,
        "scales of low-rank adapters for this request: [{id, scale}]; those that are not named get 0")
    # accepted
    n_cache_reuse: Whole = _field(0, "least chunk to reuse from the middle of the cache", low=0)
    backend_sampling: Flag = _field(False, "ignored")
    verbose: Flag = _field(False, "ignored")

    @classmethod
    def of(cls, body: Mapping[str, Any], defaults: Self, limits: Limits) -> Self:
        """A body together with the defaults for what it leaves out; ApiError naming the field that is wrong."""
        given = cls.checked(body, limits)
        changes = {name: getattr(given, name) for name in given.model_fields_set}
        if not changes.get("stop", True):
            del changes["stop"]
        if changes.get("dry_base", 1.0) < 1.0:
            del changes["dry_base"]
        if given.grammar and given.json_schema is not None:
            raise bad_request("grammar and json_schema cannot be used together")
        if given.grammar or given.json_schema is not None:  # one in a request replaces the other of the server
            changes |= {"grammar": given.grammar, "json_schema": given.json_schema}
        else:
            changes.pop("grammar", None)
        found = defaults.model_copy(update=changes)
        n_bans = len(found.banned_strings) + len(found.banned_regex) + len(found.banned_regex_case_insensitive)
        if len(found.stop) > MAX_STOPS or n_bans > MAX_STOPS:
            raise bad_request(f"stop and banned texts may have at most {MAX_STOPS} entries")
        return found

    @classmethod
    def checked(cls, body: Mapping[str, Any], limits: Limits | None = None) -> Self:
        """A body alone. Without `limits` what only a model can tell is not looked at."""
        try:
            return cls.model_validate({name: v for name, v in body.items() if v is not None}, context=limits)
        except ValidationError as e:
            raise _refusal(e.errors(include_url=False)[0]) from None

    def sampler_params(self) -> SamplerParams:
        """How tokens are chosen."""
        return SamplerParams(*_SAMPLER_VALUES(self.__dict__))

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int) -> int:
        seed = value & 0xFFFFFFFF
        return -1 if seed == 0xFFFFFFFF else seed

    @field_validator("n_probs")
    @classmethod
    def _within_vocabulary(cls, value: int, info: ValidationInfo) -> int:
        if info.context is not None and value > info.context.n_vocab:
            raise bad_request(f"n_probs must be at most {info.context.n_vocab}, the size of the vocabulary")
        return value

    @field_validator("id_slot")
    @classmethod
    def _slot(cls, value: int, info: ValidationInfo) -> int:
        return value if info.context is None else info.context.slot(value)

    @field_validator("json_schema")
    @classmethod
    def _schema(cls, value: Any) -> Any:
        if not isinstance(value, dict | bool):
            raise bad_request(f"json_schema must be an object, not {f.shown(value)}")
        return value

    @field_validator("dry_sequence_breakers")
    @classmethod
    def _breakers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
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

    @field_validator("samplers")
    @classmethod
    def _samplers(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is None:
            return value
        try:
            if isinstance(value, str):
                return sampler_names(value.split(";") if ";" in value else value)
            return sampler_names(f.text(name, f"samplers[{i}]") for i, name in enumerate(f.array(value, "samplers")))
        except UsageError as e:
            raise bad_request(str(e)) from None

    @field_validator("logit_bias", "penalty_prompt", "lora")
    @classmethod
    def _of_the_model(cls, value: Any, info: ValidationInfo) -> Any:
        limits = info.context
        if limits is None:
            return value
        if info.field_name == "logit_bias":
            return read_logit_bias(value, limits)
        if info.field_name == "lora":
            return scales_of(value, "lora", limits.n_adapters)
        return read_penalty_prompt(value, limits)


_SAMPLER_VALUES = itemgetter(*(item.name for item in fields(SamplerParams)))


def names_of(name: str) -> tuple[str, ...]:
    """The names in requests of a field of the model; the first is its own."""
    alias = GenerationBody.model_fields[name].validation_alias
    return tuple(map(str, alias.choices)) if isinstance(alias, AliasChoices) else (name,)


@cache
def field_schemas() -> dict[str, dict[str, Any]]:
    """JSON schemas of the fields by all their names; null means the default everywhere."""
    found: dict[str, dict[str, Any]] = {}
    properties = GenerationBody.model_json_schema()["properties"]
    for name in GenerationBody.model_fields:
        names = names_of(name)
        schema = {key: value for key, value in properties[names[0]].items() if key not in ("title", "default")}
        about = {"description": schema.pop("description")}
        if schema and {"type": "null"} not in schema.get("anyOf", ()):
            schema = {"anyOf": [schema, {"type": "null"}]}
        found |= dict.fromkeys(names, schema | about)
    return found


_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "model_type": "an object",
}


def _refusal(error: ErrorDetails) -> ApiError:
    """What pydantic found, as a sentence of this server."""
    name, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
    if kind == "finite_number" or (kind == "float_type" and type(value) is int):
        return bad_request(f"{name} must be a finite number")
    expected = _EXPECTED.get(kind)
    if expected is None:
        schema = field_schemas()[name]["anyOf"][0]
        expected = f.range_text(schema.get("minimum"), schema.get("maximum"), schema.get("exclusiveMinimum"))
    return bad_request(f"{name} must be {expected}, not {f.shown(value)}")
