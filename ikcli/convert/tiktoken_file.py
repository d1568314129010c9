"""Read byte-level BPE from a tiktoken file: lines of a base64 token and its rank, from which the merges follow."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from ikcli.convert.json_files import read_text
from ikcli.errors import FormatError
from ikcli.tokenizer.unicode import BYTE_TO_CHAR

_MAX_TOKEN = 4096


def read_tiktoken(path: Path) -> tuple[dict[int, str], list[str]]:
    """Return tokens by id in the byte alphabet, and merges in GGUF's form."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate((read_text(path) or "").splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (IndexError, ValueError, binascii.Error):
            raise FormatError(f"{path}: line {number} is not a token in base64 and its rank") from None
        if not token or len(token) > _MAX_TOKEN or not 0 <= rank < 1 << 27 or token in ranks:
            raise FormatError(f"{path}: line {number}: an impossible token or rank, or one that occurred before")
        ranks[token] = rank
    if not ranks or len(set(ranks.values())) != len(ranks):
        raise FormatError(f"{path}: is empty or gives two tokens the same rank")
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_merge(ranks, token, rank, path)
            merges.append(f"{_shown(left)} {_shown(right)}")
    return {rank: _shown(token) for token, rank in ranks.items()}, merges


def _shown(token: bytes) -> str:
    return "".join(BYTE_TO_CHAR[byte] for byte in token)


def _last_merge(ranks: dict[bytes, int], token: bytes, rank: int, path: Path) -> tuple[bytes, bytes]:
    """Return the two tokens that merges of lower rank reduce this one to."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
        if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
            raise FormatError(f"{path}: token {token!r} of rank {rank} cannot be merged from two of lower rank")
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
