"""Read the vocabulary of PLaMo 2 and 3, `tokenizer.jsonl`: a list of token, score and kind per line."""

from __future__ import annotations

import json
from pathlib import Path

from ikcli.convert.tokenizer_files import BYTE, CONTROL, NORMAL, UNKNOWN
from ikcli.errors import FormatError
from ikcli.text_files import read_text

NAME = "tokenizer.jsonl"
_KINDS = {"UNKNOWN": UNKNOWN, "CONTROL": CONTROL, "BYTE": BYTE}


def read_plamo(path: Path) -> dict[int, tuple[str, float, int]]:
    """Return text, score and type by id; raise a FormatError that names the line."""
    tokens: dict[int, tuple[str, float, int]] = {}
    lines = [line for line in read_text(path, error=FormatError).split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            text, score, *rest = json.loads(line)
            score = float(score)
        except (ValueError, TypeError):
            raise FormatError(f"{path}: line {number} is not a list of token, score and kind") from None
        if not isinstance(text, str):
            raise FormatError(f"{path}: line {number} is not a list of token, score and kind")
        special = text.startswith("<|plamo:") and text.endswith("|>")
        kind = _KINDS.get(str(rest[0]) if rest else "", CONTROL if special else NORMAL)
        tokens[number - 1] = text, score, kind
    if not tokens:
        raise FormatError(f"{path}: has no tokens")
    return tokens
