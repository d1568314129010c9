"""Options of embeddings: what becomes of the states of a text, and how `ik embed` prints vectors."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ikcli.settings.option import opt

# What the options of each topic share.
_embeddings = partial(opt, topic="embeddings", commands="E")

FORMATS = ("default", "array", "json", "json+", "raw")


def parse_format(text: str) -> str:
    """A format by name; nothing is the default."""
    if text not in ("", *FORMATS):
        raise ValueError(f"there are {', '.join(FORMATS)}")
    return text or FORMATS[0]


@dataclass(frozen=True, slots=True)
class EmbedConfig:
    """Vectors of texts."""

    pooling: str = _embeddings("", "--pooling", "choice", commands="SE", form="none|mean|cls|last|rank",
        example="--pooling last", choices=("none", "mean", "cls", "last", "rank"), env="LLAMA_ARG_POOLING",
        help="one vector of the states of a text: none (a row per token), mean, cls (first token), last, rank (score "
        "of a reranker). Default: as the model file says; where it does not, serve takes last, embed none")
    normalize: int = _embeddings(2, "--embd-normalize", "int", commands="SE", form="N", example="--embd-normalize 2",
        minimum=-1,
        help="norm by which vectors are divided: -1 none, 0 largest value to 32760, 1 taxicab, 2 euclidean, N p-norm")
    output_format: str = _embeddings(FORMATS[0], "--embd-output-format", "custom", form="default|array|json|json+|raw",
        example="--embd-output-format json", parse=parse_format,
        help="default: a line per vector, and cosine similarities; array: JSON lists; json: as OpenAI has it; json+: "
        "with similarities; raw: all numbers of a vector on a line")
    separator: str = _embeddings("\\n", "--embd-separator", "str", form="TEXT", example="--embd-separator '<#sep#>'",
        text=True, help="what is between the texts of -p and -f; \\n and \\t are escapes")
    json: bool = _embeddings(False, "--json", "switch", example="--json", help="as --embd-output-format json")
