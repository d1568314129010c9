"""Fields of generating requests, defined once: names, types, limits, defaults, help and their meaning for a model.

Bodies are parsed into `GenerationBody`, and the OpenAPI document shows it. Filled from the command line, it holds the
defaults of requests. Names are llama-server's; where its forks differ, both spellings are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ValidationInfo, create_model, field_validator

from ikcli.errors import UsageError
from ikcli.sampling.params import SamplerParams, sampler_names
from ikcli.server.http import fields as f
from ikcli.server.http.adapters import scales_of
from ikcli.server.http.errors import bad_request
from ikcli.server.http.limits import Limits, read_logit_bias, read_penalty_prompt
from ikcli.server.http.schema import Body, DraftLength, Flag, Number, Probability, Text, Texts, Whole, field, shown_as
from ikcli.settings.sampling import INT32, SamplingValues, sampling_values

# fmt: off

NEVER = -999.0
"""Bias of a banned token; it stands for minus infinity."""
MAX_STOPS = 1024
"""Maximum number of stop and banned strings in one request."""
WITHOUT_EFFECT = frozenset({"n_cache_reuse", "backend_sampling", "verbose"})
"""Fields accepted for the sake of clients that send them; they have no effect."""


def _sampling_fields() -> dict[str, Any]:
    kinds = {bool: Flag, int: Whole, float: Number}
    found = {}
    for item, about in sampling_values():
        made = field(item.default, about.help, low=about.low, high=about.high, above=about.above)
        found[item.name] = (kinds[type(item.default)], made)
    return found


if TYPE_CHECKING:

    class _SamplingBody(SamplingValues, Body, frozen=True): ...

else:
    _SamplingBody = create_model("_SamplingBody", __base__=Body, **_sampling_fields())


class StreamOptions(BaseModel, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: Flag | None = None


class GenerationBody(_SamplingBody, frozen=True):
    """Fields of a generating request, see the module.

    Values are in the engine's terms: text has become tokens, slot numbers are indices.
    """

    # what is generated
    n_predict: Whole = field(-1,
        "most tokens to generate; -1 = no limit, -2 = until the context is full, 0 = evaluate the prompt only", low=-2,
        high=INT32, names="n_predict max_completion_tokens max_tokens")
    stream: Flag = field(False, "send the answer in pieces as server-sent events")
    stream_options: Annotated[StreamOptions, shown_as(type="object")] = field(StreamOptions(),
        "`include_usage`: send a last event with the token counts")
    stop: Texts = field((), "texts that end the generation; they are not part of the answer")
    n_cmpl: Whole = field(1, "answers per prompt", low=1, high=64, names="n_cmpl n")
    n_keep: Whole = field(0, "prompt tokens kept when the context is full; -1 = all", low=-1, high=INT32)
    n_discard: Whole = field(0, "tokens dropped when the context is full; 0 = half", low=0, high=INT32)
    n_indent: Whole = field(0, "least indentation of generated lines", low=0, high=INT32)
    t_max_predict_ms: Whole = field(0, "time limit in ms from the first token on, acting at line ends; 0 = none",
        low=-1)
    cache_prompt: Flag = field(True, "reuse the part of the prompt that the slot holds already")
    id_slot: Whole = field(-1, "slot to use; -1 = any", low=-1)
    grammar: Text = field("", "GBNF grammar that the answer follows")
    json_schema: Annotated[Any, shown_as()] = field(None, "JSON schema that the answer follows")
    # what must not appear
    banned_strings: Texts = field((),
        "texts that may not appear in the answer, in any case; the server goes back and chooses another token")
    banned_regex: Texts = field((), "regular expressions that may match nothing in the answer")
    banned_regex_case_insensitive: Texts = field((), "as banned_regex, in any case")
    banned_n: Whole = field(1, "tokens of a banned text that are banned where it began; -1 = all, 0 = none", low=-1,
        high=INT32)
    banned_bias: Number = field(NEVER, "what is added to the logit of a banned token; -999 and below = never")
    banbuffer_size: Whole = field(0, "tokens held back for banned_regex; 0 = as many as a pattern has characters",
        low=0, high=INT32)
    rewind_count_max: Whole = field(-1,
        "how often in a row the server goes back, then the text stays; 0 = without limit, -1 = 20 or twice "
        "the number of bans", low=-1, high=INT32)
    saturate_predict: Flag = field(False, "tokens taken back do not count for n_predict")
    # what is returned
    return_tokens: Flag = field(False, "fill `tokens` with the generated token ids")
    return_progress: Flag = field(False, "send `prompt_progress` events while a long prompt is computed")
    timings_per_token: Flag = field(False, "`timings` in every event")
    response_fields: Texts = field((), "return only these fields; a/b takes field b of a")
    sse_ping_interval: Whole = field(30, "seconds of silence after which a stream gets a comment; -1 = never", low=-1,
        high=INT32)
    # sampling, besides numbers and switches
    seed: Whole = field(-1, "random seed; -1 = random", low=-(2**63), high=2**64 - 1)
    dry_sequence_breakers: Texts = field(SamplerParams().dry_sequence_breakers,
        "texts over which no repetition is seen; not empty")
    logit_bias: Annotated[Any, shown_as(type=["array", "object"])] = field((),
        "add to logits: pairs [token id or text, bias] or an object; false = never")
    samplers: Annotated[Any, shown_as(type=["array", "string"])] = field(SamplerParams().samplers,
        "samplers in order: names, or a string of letters")
    penalty_prompt: Annotated[Any, shown_as(type=["string", "array"])] = field(None,
        "text or token ids looked at for penalties instead of the prompt")
    # drafting
    speculative_n_max: DraftLength | None = field(None, "most tokens to draft", names="speculative.n_max")
    speculative_n_min: DraftLength | None = field(None, "fewest tokens worth a draft", names="speculative.n_min")
    speculative_p_min: Probability | None = field(None, "least probability of a drafted token",
        names="speculative.p_min")
    # adapters
    lora: Annotated[Any, shown_as(type="array", items={"type": "object"})] = field(None,
        "scales of low-rank adapters for this request: [{id, scale}]; those that are not named get 0")
    # accepted without effect
    n_cache_reuse: Whole = field(0, "least chunk to reuse from the middle of the cache", low=0)
    backend_sampling: Flag = field(False, "ignored")
    verbose: Flag = field(False, "ignored")

    @classmethod
    def of(cls, body: Mapping[str, Any], defaults: GenerationBody, limits: Limits) -> Self:
        """Return a body completed with the defaults. Raise ApiError naming the faulty field."""
        given = cls.checked(body, limits)
        kept = set(given.model_fields_set)
        if given.grammar and given.json_schema is not None:
            raise bad_request("grammar and json_schema cannot be used together")
        if given.grammar or given.json_schema is not None:  # either one in a request replaces the server's other one
            kept |= {"grammar", "json_schema"}
        else:
            kept.discard("grammar")
        if not given.stop:
            kept.discard("stop")
        if given.dry_base < 1.0:
            kept.discard("dry_base")
        changes = {name: value for name, value in defaults.__dict__.items() if name not in kept}
        if "n_probs" not in kept and (n_probs := given.implied_probs) is not None:
            changes["n_probs"] = limits.n_probs(n_probs)
        found = given.model_copy(update=changes)
        n_bans = len(found.banned_strings) + len(found.banned_regex) + len(found.banned_regex_case_insensitive)
        if len(found.stop) > MAX_STOPS or n_bans > MAX_STOPS:
            raise bad_request(f"stop and banned texts may have at most {MAX_STOPS} entries")
        return found

    @property
    def implied_probs(self) -> int | None:
        """The `n_probs` that another field implies."""
        return None

    def sampler_params(self) -> SamplerParams:
        """Return the sampling parameters."""
        return SamplerParams(*_SAMPLER_VALUES(self.__dict__))

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int) -> int:
        seed = value & 0xFFFFFFFF
        return -1 if seed == 0xFFFFFFFF else seed

    @field_validator("n_probs")
    @classmethod
    def _within_vocabulary(cls, value: int, info: ValidationInfo) -> int:
        return value if info.context is None else info.context.n_probs(value)

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
        """Read the array, which some clients send as text because other servers want it so."""
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
