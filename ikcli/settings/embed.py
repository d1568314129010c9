"""Options of embeddings: pooling and normalization of a text's hidden states, and the output of `ik embed`."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ikcli.settings.option import opt

# One partial per topic, with the values that its options share.
_embeddings = partial(opt, topic="embeddings", commands="E")

FORMATS = ("default", "array", "json", "json+", "raw")


def parse_format(text: str) -> str:
    """Return a format by name; an empty text means the default format."""
    if text not in ("", *FORMATS):
        raise ValueError(f"must be one of {', '.join(FORMATS)}")
    return text or FORMATS[0]


@dataclass(frozen=True, slots=True)
class EmbedConfig:
    """embed: embeddings of texts."""

    pooling: str = _embeddings("", "--pooling", "choice", commands="SE", form="none|mean|cls|last|rank",
        example="--pooling last", choices=("none", "mean", "cls", "last", "rank"), env="LLAMA_ARG_POOLING",
        help="how the states of a text become a vector: none (a row per token), mean, cls (first token), last, rank "
        "(score of a reranker). Default: as in the model file; if it has no setting, last for serve and none for embed")
    normalize: int = _embeddings(2, "--embd-normalize", "int", commands="SE", form="N", example="--embd-normalize 2",
        minimum=-1,
        help="divide vectors by a norm: -1 none, 0 largest value to 32760, 1 taxicab, 2 euclidean, N p-norm")
    output_format: str = _embeddings(FORMATS[0], "--embd-output-format", "custom", form="default|array|json|json+|raw",
        example="--embd-output-format json", parse=parse_format,
        help="default: a line per vector, and cosine similarities; array: JSON lists; json: OpenAI format; json+: "
        "json with similarities; raw: all numbers of a vector on a line")
    separator: str = _embeddings("\\n", "--embd-separator", "str", form="TEXT", example="--embd-separator '<#sep#>'",
        text=True, help="separator between the texts of -p and -f; \\n and \\t are escapes")
    json: bool = _embeddings(False, "--json", "switch", example="--json", help="same as --embd-output-format json")
