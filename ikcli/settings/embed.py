"""Options of embeddings: what becomes of the states of a text, and how `ik embed` prints vectors."""

# ruff: noqa: E501  (one option per line reads as a table; `opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from ikcli.settings.option import opt

FORMATS = ("default", "array", "json", "json+", "raw")


def parse_format(text: str) -> str:
    """A format by name; nothing is the default."""
    if text not in ("", *FORMATS):
        raise ValueError(f"there are {', '.join(FORMATS)}")
    return text or FORMATS[0]


@dataclass(frozen=True, slots=True)
class EmbedConfig:
    """Vectors of texts."""

    pooling: str = opt("", "--pooling", "choice", "one vector of the states of a text: none (a row per token), mean, cls (first token), last, rank (score of a reranker). Default: as the model file says; where it does not, serve takes last, embed none", topic="embeddings", commands="SE", form="none|mean|cls|last|rank", example="--pooling last", choices=("none", "mean", "cls", "last", "rank"), env="LLAMA_ARG_POOLING")
    normalize: int = opt(2, "--embd-normalize", "int", "norm by which vectors are divided: -1 none, 0 largest value to 32760, 1 taxicab, 2 euclidean, N p-norm", topic="embeddings", commands="SE", form="N", example="--embd-normalize 2", minimum=-1)
    output_format: str = opt(FORMATS[0], "--embd-output-format", "custom", "default: a line per vector, and cosine similarities; array: JSON lists; json: as OpenAI has it; json+: with similarities; raw: all numbers of a vector on a line", topic="embeddings", commands="E", form="default|array|json|json+|raw", example="--embd-output-format json", parse=parse_format)
    separator: str = opt("\\n", "--embd-separator", "str", "what is between the texts of -p and -f; \\n and \\t are escapes", topic="embeddings", commands="E", form="TEXT", example="--embd-separator '<#sep#>'", text=True)
    json: bool = opt(False, "--json", "switch", "as --embd-output-format json", topic="embeddings", commands="E", example="--json")
