"""Give a Qwen3-Reranker, which answers "yes" or "no", the keys and the classification head of a model that ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.convert.build import Build
from ikcli.convert.pieces import TensorRows
from ikcli.errors import FormatError
from ikcli.text_files import read_text

_ANSWERS = ("yes", "no")
_RANK = 4  # the pooling type
_NAMES = ("qwen3-reranker", "qwen3-vl-reranker")
_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def ranks(m: Build, directory: Path) -> bool:
    """Return whether the checkpoint is a Qwen3-Reranker, which only its name or README.md says."""
    if not m.arch.startswith("qwen3"):
        return False
    readme = directory / "README.md"
    text = read_text(readme, error=FormatError).lower() if readme.is_file() else ""
    hints = f"{directory.resolve().name} {m.config.raw.get('_name_or_path', '')}".lower()
    return any(f"# {name}" in text or name in hints for name in _NAMES)


def add_ranking(m: Build, directory: Path, vocabulary: Mapping[str, Any]) -> None:
    """Add the rows of the output matrix for both answers as `cls.output`, their labels and the prompt."""
    tokens = list(vocabulary["tokenizer.ggml.tokens"])
    missing = [answer for answer in _ANSWERS if answer not in tokens]
    if missing:
        raise FormatError(f"{directory}: the vocabulary of a reranker needs the token {missing[0]!r}")
    head = m.tensors.get("output.weight") or m.tensors["token_embd.weight"]
    piece = head.pieces[0]
    if len(head.pieces) != 1 or not isinstance(piece, TensorRows) or piece.order is not None:
        raise FormatError(f"{directory}: the output matrix of a reranker should be one tensor of the checkpoint")
    order = np.array([tokens.index(answer) for answer in _ANSWERS], np.int64)
    m.add("cls.output.weight", [TensorRows(piece.name, len(order), piece.width, 0, order)])
    m.key("pooling_type", _RANK)
    m.key("classifier.output_labels", list(_ANSWERS))
    m.metadata["tokenizer.chat_template.rerank"] = _PROMPT
