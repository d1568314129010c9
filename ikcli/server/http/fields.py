"""The request fields of generation: one table with name, other names, type, limits and help.

It drives validation, `generation_settings` in answers, `/props`, and the OpenAPI document. Every field may be null,
which means its default. Names and defaults are those of llama-server; where its forks differ both spellings are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ikcli.server.http.errors import bad_request

Kind = Literal["bool", "int", "float", "text", "texts", "json"]
INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Field:
    """One request field. `sampling`: it is an attribute of SamplerParams (of the same name). `low`, `high`: limits.

    `effect` is empty for fields that do something, otherwise why they are accepted nevertheless.
    """

    name: str
    kind: Kind
    help: str
    sampling: bool = False
    low: float | None = None
    high: float | None = None
    aliases: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None
    effect: str = ""


def _s(name: str, kind: Kind, help: str, low: float | None = None, high: float | None = None) -> Field:
    return Field(name, kind, help, True, low, high)


_NOT_HERE = "accepted for clients that send it; it changes nothing here"

FIELDS: tuple[Field, ...] = (
    # what is generated
    Field("n_predict", "int", "most tokens to generate; -1 = no limit, -2 = until the context is full, 0 = evaluate "
          "the prompt only", low=-2, high=INT32, aliases=("max_completion_tokens", "max_tokens")),
    Field("stream", "bool", "send the answer in pieces as server-sent events"),
    Field("stream_options", "json", "`include_usage`: send a last event with the token counts",
          schema={"type": "object"}),
    Field("stop", "texts", "texts that end the generation; they are not part of the answer"),
    Field("n_cmpl", "int", "answers per prompt", low=1, high=64, aliases=("n",)),
    Field("n_keep", "int", "prompt tokens kept when the context is full; -1 = all", low=-1, high=INT32),
    Field("n_discard", "int", "tokens dropped when the context is full; 0 = half", low=0, high=INT32),
    Field("n_indent", "int", "least indentation of generated lines", low=0, high=INT32),
    Field("t_max_predict_ms", "int", "time limit in ms from the first token on, acting at line ends; 0 = none", low=-1),
    Field("cache_prompt", "bool", "reuse the part of the prompt that the slot holds already"),
    Field("id_slot", "int", "slot to use; -1 = any", low=-1),
    Field("grammar", "text", "GBNF grammar that the answer follows"),
    Field("json_schema", "json", "JSON schema that the answer follows", schema={}),
    # what may not appear
    Field("banned_strings", "texts", "texts that may not appear in the answer, in any case; the server goes back and "
          "chooses another token"),
    Field("banned_regex", "texts", "regular expressions that may match nothing in the answer"),
    Field("banned_regex_case_insensitive", "texts", "as banned_regex, in any case"),
    Field("banned_n", "int", "tokens of a banned text that are banned where it began; -1 = all, 0 = none", low=-1,
          high=INT32),
    Field("banned_bias", "float", "what is added to the logit of a banned token; -999 and below = never"),
    Field("banbuffer_size", "int", "tokens held back for banned_regex; 0 = as many as a pattern has characters", low=0,
          high=INT32),
    Field("rewind_count_max", "int", "how often in a row the server goes back, then the text stays; 0 = without limit, "
          "-1 = 20 or twice the number of bans", low=-1, high=INT32),
    Field("saturate_predict", "bool", "tokens taken back do not count for n_predict"),
    # what is returned
    Field("return_tokens", "bool", "fill `tokens` with the generated token ids"),
    Field("return_progress", "bool", "send `prompt_progress` events while a long prompt is computed"),
    Field("timings_per_token", "bool", "`timings` in every event"),
    Field("response_fields", "texts", "return only these fields; a/b takes field b of a"),
    Field("sse_ping_interval", "int", "seconds of silence after which a stream gets a comment; -1 = never", low=-1,
          high=INT32),
    # sampling
    _s("seed", "int", "random seed; -1 = random", -(2**63), 2**64 - 1),
    _s("temperature", "float", "0 = always the most likely token"),
    _s("dynatemp_range", "float", "the temperature varies by this much with the entropy; 0 = off"),
    _s("dynatemp_exponent", "float", "exponent of the dynamic temperature"),
    _s("top_k", "int", "keep the K most likely tokens; 0 or less = all", -INT32, INT32),
    _s("top_p", "float", "keep the most likely tokens up to this total probability; 1 = off"),
    _s("min_p", "float", "drop tokens below this share of the best one; 0 = off"),
    _s("tfs_z", "float", "tail free sampling; 1 = off"),
    _s("typical_p", "float", "locally typical sampling; 1 = off"),
    _s("top_n_sigma", "float", "keep tokens within N standard deviations of the best logit; below 0 = off"),
    _s("xtc_probability", "float", "probability of leaving out the most likely tokens; 0 = off"),
    _s("xtc_threshold", "float", "tokens at least this likely may be left out; above 0.5 = off"),
    _s("mirostat", "int", "0 off, 1 or 2", 0, 2),
    _s("mirostat_tau", "float", "target entropy of mirostat"),
    _s("mirostat_eta", "float", "learning rate of mirostat"),
    _s("repeat_last_n", "int", "tokens looked back at for penalties; -1 = whole context, 0 = off", -1, INT32),
    _s("repeat_penalty", "float", "penalty for repeated tokens; 1 = off"),
    _s("presence_penalty", "float", "penalty for having occurred; 0 = off"),
    _s("frequency_penalty", "float", "penalty per earlier occurrence; 0 = off"),
    _s("penalize_nl", "bool", "penalties also apply to line ends"),
    Field("penalty_prompt", "json", "text or token ids looked at for penalties instead of the prompt",
          schema={"type": ["string", "array"]}),
    _s("dry_multiplier", "float", "strength of the penalty for repeating sequences; 0 = off"),
    _s("dry_base", "float", "growth of that penalty with the length of the repetition"),
    _s("dry_allowed_length", "int", "longest repetition without that penalty", 0, INT32),
    _s("dry_penalty_last_n", "int", "tokens looked back at for repetitions; -1 = whole context, 0 = off", -1, INT32),
    Field("dry_sequence_breakers", "texts", "texts over which no repetition is seen; not empty"),
    _s("adaptive_target", "float", "prefer tokens near this probability; below 0 = off", high=1),
    _s("adaptive_decay", "float", "how slowly the target follows", 0, 0.99),
    _s("adaptive_updt_w_cur", "bool", "the target follows the chosen token's own probability"),
    _s("min_keep", "int", "tokens that samplers keep at least", 0, INT32),
    _s("n_probs", "int", "return the probabilities of this many tokens at every position", 0),
    _s("post_sampling_probs", "bool", "return probabilities after the samplers instead of before"),
    _s("ignore_eos", "bool", "go on after the end-of-text token"),
    Field("logit_bias", "json", "add to logits: pairs [token id or text, bias] or an object; false = never",
          schema={"type": ["array", "object"]}),
    Field("samplers", "json", "samplers in order: names, or a string of letters",
          schema={"type": ["array", "string"]}),
    # drafting
    Field("speculative.n_max", "int", "most tokens to draft", low=0, high=INT32),
    Field("speculative.n_min", "int", "fewest tokens worth a draft", low=0, high=INT32),
    Field("speculative.p_min", "float", "least probability of a drafted token", low=0, high=1),
    # adapters
    Field("lora", "json", "scales of low-rank adapters for this request: [{id, scale}]; those that are not named get 0",
          schema={"type": "array", "items": {"type": "object"}}),
    # accepted
    Field("n_cache_reuse", "int", "least chunk to reuse from the middle of the cache", low=0, effect=_NOT_HERE),
    Field("backend_sampling", "bool", "ignored", effect=_NOT_HERE),
    Field("verbose", "bool", "ignored", effect=_NOT_HERE),
)  # fmt: skip


def read_field(field: Field, body: dict[str, Any]) -> Any:
    """The checked value of a field, or None if it is missing or null; ApiError 400 naming it."""
    for name in (field.name, *field.aliases):
        value = body.get(name)
        if value is not None:
            return checked(value, field.kind, name, field.low, field.high)
    return None


def checked(value: Any, kind: Kind, name: str, low: float | None = None, high: float | None = None) -> Any:
    """`value` as `kind`; ApiError 400 with the field's name if its type or range is wrong."""
    if kind == "json":
        return value
    if kind == "bool":
        return boolean(value, name)
    if kind == "text":
        return text(value, name)
    if kind == "texts":
        return texts(value, name)
    number = integer(value, name) if kind == "int" else real(value, name)
    if (low is not None and number < low) or (high is not None and number > high):
        raise bad_request(f"{name} must be {_range(low, high)}, not {shown(value)}")
    return number


def boolean(value: Any, name: str) -> bool:
    """A JSON boolean."""
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, not {shown(value)}")
    return value


def integer(value: Any, name: str) -> int:
    """A JSON number without fraction."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{name} must be an integer, not {shown(value)}")
    if not -(2**63) <= value < 2**64:
        raise bad_request(f"{name} is out of range")
    return value


def real(value: Any, name: str) -> float:
    """A finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{name} must be a number, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise bad_request(f"{name} must be a finite number")
    return number


def text(value: Any, name: str) -> str:
    """A JSON string."""
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string, not {shown(value)}")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A JSON string or an array of strings; empty strings are left out."""
    if isinstance(value, str):
        return (value,) if value else ()
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a string or an array of strings, not {shown(value)}")
    return tuple(item for i, item in enumerate(value) if text(item, f"{name}[{i}]"))


def array(value: Any, name: str) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise bad_request(f"{name} must be an array, not {shown(value)}")
    return value


def table(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value as error messages show it: short, containers by their kind."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:40]}"' + ("..." if len(value) > 40 else "")
    return str(value)[:40]


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"from {low:.12g} to {high:.12g}"
    return f"at least {low:.12g}" if low is not None else f"at most {high:.12g}"
