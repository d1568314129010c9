"""Options of llama.cpp and ik_llama.cpp that have another name here, or no counterpart.

`IGNORED` ones are accepted and reported as "not supported, ignored", so that a pasted command line runs. `INSTEAD` ones
are translated to options of this program with the same meaning. `REFUSED` ones cannot be ignored: something else would
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ikcli.cli.argv import looks_like_option
from ikcli.errors import UsageError
from ikcli.settings.values import OFF

_NO_VALUE = """
--infill -dkvc --dump-kv-cache -fidx
--fused-indexer-topk -mtp --multi-token-prediction -no-mtp --no-multi-token-prediction
-smf16 --split-mode-f16 -smf32 --split-mode-f32 --perplexity
--all-logits --send-done --webui-mcp-proxy --no-webui-mcp-proxy
--ui-mcp-proxy --no-ui-mcp-proxy --peg -ptcall --parallel-tool-calls --adaptive-updt-w-cur --minilog
--log-disable --log-enable --log-new --log-append --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps
--perf --no-perf -dio --direct-io -ndio --no-direct-io -bs --backend-sampling
-kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots --no-cache-idle-slots -ag --agent -no-ag --no-agent
--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-cpu-moe -cmoed --cpu-moe-draft --nextn
--progress
"""

_ONE_VALUE = """
-tm --threads-mtmd -td --threads-draft -tbd --threads-batch-draft --spec-draft-threads --spec-draft-threads-batch
-gan --grp-attn-n -gaw --grp-attn-w
--attention -dt
--defrag-thold -mea --max-extra-alloc --cfg-negative-prompt --cfg-negative-prompt-file --cfg-scale
--spec-ckpt-mode --recurrent-ckpt-mode -ns --sequences -ps --p-split
--spec-stage --suffix-pattern-len --suffix-max-depth --suffix-corpus
-mmdev --mmproj-device --mtmd-kq-type --mtmd-batch-max-tokens --audio --video-fps
--video-timestamp-interval --video-ffmpeg-dir
-ctk-first --cache-type-k-first
-ctk-last --cache-type-k-last -ctv-first --cache-type-v-first -ctv-last --cache-type-v-last -mtprot
--mtp-requantize-output-tensor
--rpc -rpc -gfm --gpu-fit-margin -fitc --fit-ctx -cuda --cuda-params -draft --draft-params --moe-cache --moe-cache-mib
-wgt --worst-graph-tokens -fdn --fused-delta-net -grt --graph-reduce-type -gap
--graph-attn-precision -lzm --lazy-mode --kv-unified-per-slot --allowlist-unicode-rule
--allowlist-pieces --allowlist-keyword --allowlist-keyword-delay --expiring-logit-bias-file -ld --logdir -ptc
--print-token-count --tools --tools-runtime --mcp-servers-config --mcp-servers-json
--sql-save-file --sqlite-zstd-ext-file --context-file --chunk-size --chunk-separator --junk
-crs --cache-ram-similarity -cram-n-min --cache-ram-n-min --pos
--delay --n-gen-warmup -hfv -hfrv --hf-repo-v -hffv --hf-file-v -mv --model-vocoder
--cpu-mask-batch -Cb --cpu-range-batch -Crb --cpu-strict-batch --prio-batch --poll-batch
--spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict
--cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd
--cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch
--prio-batch-draft --spec-draft-poll-batch --poll-batch-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed
--n-cpu-moe-draft --spec-draft-p-split --draft-p-split --spec-draft-sampling --spec-synth-len --spec-synth-rates
"""

_TWO_VALUES = "--spec-replace"

IGNORED: dict[str, int] = {
    name: count for count, names in enumerate((_NO_VALUE, _ONE_VALUE, _TWO_VALUES)) for name in names.split()
}
"""The number of values that each takes."""


@dataclass(frozen=True, slots=True)
class Instead:
    """The translation of an option.

    `words`, where `{}` is the value, or words by value where the value decides. No words: this is the behaviour anyway.
    """

    words: tuple[str, ...] = ()
    by_value: Mapping[str, tuple[str, ...]] | None = None

    @property
    def takes_value(self) -> bool:
        return self.by_value is not None or any("{}" in word for word in self.words)


def _words(text: str) -> Instead:
    return Instead(tuple(text.split()))


def _drafter(type: str, keys: Mapping[str, str]) -> dict[str, Instead]:
    """Translate `--spec-ngram-simple-size-n 12` and the like, by type and key of `--spec-set`."""
    return {f"--spec-{type}-{name}": _words(f"--spec-set {type}:{key}={{}}") for name, key in keys.items()}


_LOOKUP = {"size-n": "ngram_size_n", "size-m": "ngram_size_m", "min-hits": "ngram_min_hits"}
_LOAD = Instead(
    by_value={
        "auto": (),
        "none": ("--no-mmap", "--mlock=off"),
        "mmap": ("--mmap", "--mlock=off"),
        "mlock": ("--no-mmap", "--mlock"),
        "mmap+mlock": ("--mmap", "--mlock"),
        "dio": ("--no-mmap", "--mlock=off"),
    }
)
_LEVEL = Instead(by_value={**dict.fromkeys("0123", ()), **dict.fromkeys("456789", ("-v",))})

INSTEAD: dict[str, Instead] = {
    "-lm": _LOAD,
    "--load-mode": _LOAD,
    "-lv": _LEVEL,
    "--log-verbosity": _LEVEL,
    "--log-jsonl": _words("--log-format json"),
    "--no-log-jsonl": _words("--log-format text"),
    "--op-offload": Instead(),
    "-nopo": _words("-op ALL,0"),
    "--no-op-offload": _words("-op ALL,0"),
    "--spec-default": _words("--spec-type ngram-mod"),
    **_drafter("ngram", _LOOKUP),
    **_drafter("ngram-simple", _LOOKUP),
    **_drafter("ngram-map-k", _LOOKUP),
    **_drafter("ngram-map-k4v", _LOOKUP),
    **_drafter("ngram-mod", {"n-min": "n_min", "n-max": "n_max", "n-match": "ngram_size_n"}),
}


def words_instead(name: str, attached: str | None, rest: Sequence[str], *, lists: bool) -> list[str]:
    """Return the words to read in place of a name of `INSTEAD`, its attached value and the words that follow it.

    With `lists` (bench), 0 or 1 may follow a switch.
    """
    instead, text, after = INSTEAD[name], attached, list(rest)
    if text is None and after and (instead.takes_value or (lists and after[0] in ("0", "1"))):
        text = None if looks_like_option(after[0]) else after.pop(0)
    if not instead.takes_value:
        return [*(() if text is not None and text.lower() in OFF else instead.words), *after]
    choices = instead.by_value
    if text is None or (choices is not None and text.lower() not in choices):
        given = "needs a value" if text is None else f'"{text}" is unknown'
        raise UsageError(f"{name}: {given}" + (f"; it is one of {', '.join(choices)}" if choices else ""))
    return [word.replace("{}", text) for word in (choices[text.lower()] if choices else instead.words)] + after


VARIABLES: dict[str, str] = {
    "LLAMA_ARG_KV_OFFLOAD": "--kv-offload",
    "LLAMA_ARG_LOAD_MODE": "--load-mode",
    "LLAMA_ARG_LOG_VERBOSITY": "--log-verbosity",
}
"""Environment variables of options of this table, and of negative spellings."""

OTHER_COMMANDS = {"--list-devices": "devices", "-cl": "list", "--cache-list": "list"}
"""Options that ask for something other than a run, and the command that does it."""

_PRESETS = """
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec
--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default
--vision-gemma-12b-default
"""
_PRESET = "a model with settings that only llama.cpp knows; name its repository with -hf USER/REPO:QUANT"

REFUSED: dict[str, str] = {
    "--docker-repo": "models of Docker Hub cannot be downloaded; name a repository with -hf USER/REPO:QUANT",
    "--completion-bash": "the completion of ik is installed by ik --install-completion",
    **dict.fromkeys(
        _PRESETS.split(),
        _PRESET,
    ),
}
"""Why, and the way out."""

MEANT = {
    "--quantize-q": "--custom-q",
    "--custom-quants": "--custom-q",
    "--custom-types": "--custom-q",
    "--tensor-types": "--custom-q",
    "--numactl": "--numa",
}
"""Names that users write for an option whose name is far from theirs."""
