"""Sampling parameters, and the options of texts that constrain sampling.

`SamplingValues` is the table of numbers and switches. Each is a parameter of the sampler and a field of requests; those
with option spellings are command-line options too.
"""

# ruff: noqa: RUF009  (`opt` and `_value` make dataclass fields)
# fmt: off

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ikcli.settings.option import Kind, opt
from ikcli.settings.values import (
    parse_text_item,
)

INT32 = 2**31 - 1
# One partial per topic, with the values that its options share.
_sampling = partial(opt, topic="sampling", commands="SC")
_KINDS: dict[type, Kind] = {bool: "switch", int: "int", float: "float"}


@dataclass(frozen=True, slots=True)
class RequestField:
    """A sampling parameter in requests: its help, its limits, and whether the web page has a setting for it."""

    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    page: bool = False


def _value(
    default: Any,
    help: str,
    option: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    page: bool = False,
    **extra: Any,
) -> Any:
    """Return the field of a parameter.

    `option` holds the spellings of its command-line option, `extra` the arguments that only the option needs.
    """
    about = {"request": RequestField(help, low, high, above, page)}
    if option:
        kind = extra.pop("kind", _KINDS[type(default)])
        about |= _sampling(default, option, kind, help, **extra).metadata
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Numbers and switches of sampling, under their names in requests."""

    temperature: float = _value(0.8, "temperature; 0 = always the most likely token", "--temp --temperature", form="T",
        example="--temp 0.6", minimum=0, env="LLAMA_ARG_TEMPERATURE", page=True)
    top_k: int = _value(40, "keep the K most likely tokens; 0 or less = all", "--top-k", form="K",
        example="--top-k 40", env="LLAMA_ARG_TOP_K", low=-INT32, high=INT32, page=True)
    top_p: float = _value(0.95, "keep the most likely tokens up to this total probability; 1 = off", "--top-p",
        form="P", example="--top-p 0.95", env="LLAMA_ARG_TOP_P", page=True)
    min_p: float = _value(0.05, "drop tokens below this share of the best one; 0 = off", "--min-p", form="P",
        example="--min-p 0.05", env="LLAMA_ARG_MIN_P", page=True)
    tfs_z: float = _value(1.0, "tail free sampling; 1 = off", "--tfs", form="Z", example="--tfs 1")
    typical_p: float = _value(1.0, "locally typical sampling; 1 = off", "--typical --typical-p", form="P",
        example="--typical 1", page=True)
    repeat_penalty: float = _value(1.0, "penalty for repeated tokens; 1 = off", "--repeat-penalty", form="R",
        example="--repeat-penalty 1.1", env="LLAMA_ARG_REPEAT_PENALTY", above=0, page=True)
    repeat_last_n: int = _value(64, "tokens looked back at for penalties; -1 = whole context, 0 = off",
        "--repeat-last-n", form="N", example="--repeat-last-n 64", low=-1, high=INT32, page=True)
    frequency_penalty: float = _value(0.0, "penalty per earlier occurrence; 0 = off", "--frequency-penalty", form="F",
        example="--frequency-penalty 0.1", env="LLAMA_ARG_FREQUENCY_PENALTY", page=True)
    presence_penalty: float = _value(0.0, "penalty for having occurred; 0 = off", "--presence-penalty", form="F",
        example="--presence-penalty 0.1", env="LLAMA_ARG_PRESENCE_PENALTY", page=True)
    top_n_sigma: float = _value(-1.0, "keep tokens within N standard deviations of the best logit; below 0 = off",
        "--top-n-sigma --top-nsigma", form="N", example="--top-n-sigma 1", page=True)
    dynatemp_range: float = _value(0.0, "the temperature varies by this much with the entropy; 0 = off",
        "--dynatemp-range", form="R", example="--dynatemp-range 0.5", minimum=0, page=True)
    dynatemp_exponent: float = _value(1.0, "exponent of the dynamic temperature", "--dynatemp-exp", form="E",
        example="--dynatemp-exp 1")
    xtc_probability: float = _value(0.0, "probability of leaving out the most likely tokens; 0 = off",
        "--xtc-probability", form="P", example="--xtc-probability 0.5", page=True)
    xtc_threshold: float = _value(0.1, "tokens at least this likely may be left out; above 0.5 = off",
        "--xtc-threshold", form="P", example="--xtc-threshold 0.1", page=True)
    mirostat: int = _value(0, "mirostat sampling: 0 off, 1, or 2", "--mirostat", kind="choice", form="0|1|2",
        example="--mirostat 2", choices=("0", "1", "2"), low=0, high=2)
    mirostat_eta: float = _value(0.1, "learning rate of mirostat", "--mirostat-lr", form="ETA",
        example="--mirostat-lr 0.1")
    mirostat_tau: float = _value(5.0, "target entropy of mirostat", "--mirostat-ent", form="TAU",
        example="--mirostat-ent 5")
    dry_multiplier: float = _value(0.0, "strength of the penalty for repeating sequences (DRY); 0 = off",
        "--dry-multiplier", form="F", example="--dry-multiplier 0.8", page=True)
    dry_base: float = _value(1.75, "growth of the DRY penalty with the length of the repetition", "--dry-base",
        form="F", example="--dry-base 1.75", page=True)
    dry_allowed_length: int = _value(2, "longest repetition without DRY penalty", "--dry-allowed-length", form="N",
        example="--dry-allowed-length 2", low=0, high=INT32, page=True)
    dry_penalty_last_n: int = _value(-1, "tokens DRY looks back at; 0 = off, -1 = whole context",
        "--dry-penalty-last-n", form="N", example="--dry-penalty-last-n 1024", minimum=-1, low=-1, high=INT32)
    adaptive_target: float = _value(-1.0, "prefer tokens near this probability; below 0 = off", "--adaptive-target",
        form="P", example="--adaptive-target 0.5", high=1)
    adaptive_decay: float = _value(0.9, "how slowly the adaptive target follows, 0 to 0.99", "--adaptive-decay",
        form="D", example="--adaptive-decay 0.9", minimum=0, low=0, high=0.99)
    adaptive_updt_w_cur: bool = _value(False, "the target follows the chosen token's own probability")
    penalize_nl: bool = _value(False, "repetition penalties also apply to line ends", "--penalize-nl",
        example="--penalize-nl")
    min_keep: int = _value(0, "tokens that samplers keep at least", low=0, high=INT32)
    n_probs: int = _value(0, "return the probabilities of this many tokens at every position", low=0)
    post_sampling_probs: bool = _value(False, "return probabilities after the samplers instead of before")
    ignore_eos: bool = _value(False, "continue after the end-of-text token", "--ignore-eos", example="--ignore-eos")


def sampling_values() -> Iterator[tuple[Field[Any], RequestField]]:
    """Yield the fields of `SamplingValues` with their request fields."""
    for item in fields(SamplingValues):
        yield item, item.metadata["request"]


@dataclass(frozen=True, slots=True)
class SamplingConfig(SamplingValues):
    """Choice of the next token (serve, chat)."""

    dry_sequence_breakers: tuple[str, ...] = _sampling((), "--dry-sequence-breaker", "custom", form="TEXT",
        example='--dry-sequence-breaker ";"', parse=parse_text_item, repeat=True,
        help="text that ends a repetition for DRY, replacing the default ones; none = no such text; repeatable")
    logit_bias: tuple[str, ...] = _sampling((), "-l --logit-bias", "custom", form="ID+BIAS", example="-l 15043+1",
        parse=parse_text_item, repeat=True, help="add to the logit of a token; repeatable")
    grammar: str = _sampling("", "--grammar", "str", form="GBNF", example='--grammar \'root ::= "yes" | "no"\'',
        help="GBNF grammar that answers must follow")
    grammar_file: Path | None = _sampling(None, "--grammar-file", "path", form="FILE",
        example="--grammar-file list.gbnf", help="file with the grammar")
    json_schema: str = _sampling("", "-j --json-schema", "str", form="JSON", example="-j '{}'",
        help="JSON schema that answers must follow")
    json_schema_file: Path | None = _sampling(None, "-jf --json-schema-file", "path", form="FILE",
        example="-jf answer.schema.json", help="file with the JSON schema")
    samplers: str = _sampling("", "--samplers", "str", form="LIST", example='--samplers "top_k;top_p;temperature"',
        help="samplers in order, separated by ;")
    sampler_seq: str = _sampling("", "--sampling-seq --sampler-seq", "str", form="LETTERS",
        example="--sampling-seq edskypmxt", help="samplers in order, one letter each")
    lookup_cache_dynamic: Path | None = _sampling(None, "-lcd --lookup-cache-dynamic", "path", form="FILE",
        example="-lcd ngrams.bin",
        help="n-gram file for lookup decoding, updated while running; not a KV cache dump (see --slot-save-path)")
    lookup_cache_static: Path | None = _sampling(None, "-lcs --lookup-cache-static", "path", form="FILE",
        example="-lcs ngrams.bin", help="n-gram file for lookup decoding, read only")
