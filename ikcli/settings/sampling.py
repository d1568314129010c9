"""Options of sampling and of text that constrains it."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt
from ikcli.settings.values import (
    parse_text_item,
)

# What the options of each topic share.
_sampling = partial(opt, topic="sampling", commands="SC")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """The choice of the next token (serve, chat)."""

    temp: float = _sampling(0.8, "--temp --temperature", "float", form="T", example="--temp 0.6", minimum=0,
        env="LLAMA_ARG_TEMPERATURE", help="temperature; 0 = always the most likely token")
    top_k: int = _sampling(40, "--top-k", "int", form="K", example="--top-k 40", env="LLAMA_ARG_TOP_K",
        help="keep the K most likely tokens; 0 or less = all")
    top_p: float = _sampling(0.95, "--top-p", "float", form="P", example="--top-p 0.95", env="LLAMA_ARG_TOP_P",
        help="keep the most likely tokens up to this total probability")
    min_p: float = _sampling(0.05, "--min-p", "float", form="P", example="--min-p 0.05", env="LLAMA_ARG_MIN_P",
        help="drop tokens below this share of the best one")
    tfs: float = _sampling(1.0, "--tfs", "float", form="Z", example="--tfs 1", help="tail free sampling; 1 = off")
    typical: float = _sampling(1.0, "--typical --typical-p", "float", form="P", example="--typical 1",
        help="locally typical sampling; 1 = off")
    repeat_penalty: float = _sampling(1.0, "--repeat-penalty", "float", form="R", example="--repeat-penalty 1.1",
        env="LLAMA_ARG_REPEAT_PENALTY", help="penalty for repeated tokens; 1 = off")
    repeat_last_n: int = _sampling(64, "--repeat-last-n", "int", form="N", example="--repeat-last-n 64",
        help="tokens looked back at for penalties; -1 = whole context")
    frequency_penalty: float = _sampling(0.0, "--frequency-penalty", "float", form="F",
        example="--frequency-penalty 0.1", env="LLAMA_ARG_FREQUENCY_PENALTY",
        help="penalty per earlier occurrence; 0 = off")
    presence_penalty: float = _sampling(0.0, "--presence-penalty", "float", form="F", example="--presence-penalty 0.1",
        env="LLAMA_ARG_PRESENCE_PENALTY", help="penalty for having occurred; 0 = off")
    top_n_sigma: float = _sampling(-1.0, "--top-n-sigma --top-nsigma", "float", form="N", example="--top-n-sigma 1",
        help="keep tokens within N standard deviations of the best logit; below 0 = off")
    dynatemp_range: float = _sampling(0.0, "--dynatemp-range", "float", form="R", example="--dynatemp-range 0.5",
        minimum=0, help="temperature varies by this much with the entropy; 0 = off")
    dynatemp_exponent: float = _sampling(1.0, "--dynatemp-exp", "float", form="E", example="--dynatemp-exp 1",
        help="exponent of the dynamic temperature")
    xtc_probability: float = _sampling(0.0, "--xtc-probability", "float", form="P", example="--xtc-probability 0.5",
        help="probability of leaving out the most likely tokens; 0 = off")
    xtc_threshold: float = _sampling(0.1, "--xtc-threshold", "float", form="P", example="--xtc-threshold 0.1",
        help="tokens at least this likely may be left out; above 0.5 = off")
    mirostat: int = _sampling(0, "--mirostat", "choice", form="0|1|2", example="--mirostat 2", choices=("0", "1", "2"),
        help="mirostat sampling: 0 off, 1, or 2")
    mirostat_eta: float = _sampling(0.1, "--mirostat-lr", "float", form="ETA", example="--mirostat-lr 0.1",
        help="learning rate of mirostat")
    mirostat_tau: float = _sampling(5.0, "--mirostat-ent", "float", form="TAU", example="--mirostat-ent 5",
        help="target entropy of mirostat")
    dry_multiplier: float = _sampling(0.0, "--dry-multiplier", "float", form="F", example="--dry-multiplier 0.8",
        help="strength of the penalty for repeating sequences (DRY); 0 = off")
    dry_base: float = _sampling(1.75, "--dry-base", "float", form="F", example="--dry-base 1.75",
        help="growth of the DRY penalty with the length of the repetition")
    dry_allowed_length: int = _sampling(2, "--dry-allowed-length", "int", form="N", example="--dry-allowed-length 2",
        help="longest repetition without DRY penalty")
    dry_penalty_last_n: int = _sampling(-1, "--dry-penalty-last-n", "int", form="N",
        example="--dry-penalty-last-n 1024", minimum=-1, help="tokens DRY looks back at; 0 = off, -1 = whole context")
    dry_sequence_breakers: tuple[str, ...] = _sampling((), "--dry-sequence-breaker", "custom", form="TEXT",
        example='--dry-sequence-breaker ";"', parse=parse_text_item, repeat=True,
        help="text that ends a repetition for DRY, replacing the default ones; none = no such text; repeatable")
    adaptive_target: float = _sampling(-1.0, "--adaptive-target", "float", form="P", example="--adaptive-target 0.5",
        help="prefer tokens near this probability; below 0 = off")
    adaptive_decay: float = _sampling(0.9, "--adaptive-decay", "float", form="D", example="--adaptive-decay 0.9",
        minimum=0, help="how slowly the adaptive target follows, 0 to 0.99")
    penalize_nl: bool = _sampling(False, "--penalize-nl", "switch", example="--penalize-nl",
        help="repetition penalties also apply to line ends")
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
    ignore_eos: bool = _sampling(False, "--ignore-eos", "switch", example="--ignore-eos",
        help="continue after the end-of-text token")
    lookup_cache_dynamic: Path | None = _sampling(None, "-lcd --lookup-cache-dynamic", "path", form="FILE",
        example="-lcd ngrams.bin",
        help="n-gram file for lookup decoding, updated while running; not a KV cache dump (see --slot-save-path)")
    lookup_cache_static: Path | None = _sampling(None, "-lcs --lookup-cache-static", "path", form="FILE",
        example="-lcs ngrams.bin", help="n-gram file for lookup decoding, read only")
