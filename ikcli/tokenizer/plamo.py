"""The model of PLaMo 2 and 3: of all ways to cut a text into tokens, that whose scores add up to most.

Scores count in ten-thousandths. A character that no token begins at becomes the tokens of its bytes, at a price that
only is paid where nothing else is left. Of ways that cost the same, the one with the longer first token is taken.
"""

from __future__ import annotations

import math

from ikcli.errors import FormatError
from ikcli.tokenizer import unicode as uni
from ikcli.tokenizer.vocab import Attr, Vocab

_UNKNOWN_COST = 10_000_000
_LEAST_SCORE = -20_000_000  # tokens with a lower score are never used


class PlamoModel:
    """An encoder of text without special tokens."""

    def __init__(self, vocab: Vocab) -> None:
        self._costs: dict[str, tuple[int, int]] = {}
        self._lengths: dict[str, list[int]] = {}
        self._bytes = [-1] * 256
        lengths: dict[str, set[int]] = {}
        for token, (text, score, attr) in enumerate(zip(vocab.tokens, vocab.scores, vocab.attrs, strict=True)):
            if attr & Attr.BYTE:
                self._bytes[_byte(vocab, token, text)] = token
            elif text and not attr & Attr.UNUSED and math.isfinite(score) and round(score * 1e4) > _LEAST_SCORE:
                self._costs[text] = -round(score * 1e4), token
                lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        if -1 in self._bytes:
            missing = self._bytes.index(-1)
            raise FormatError(f"{vocab.source}: the vocabulary has no token for the byte <0x{missing:02X}>")

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of `text`."""
        text = uni.code_points(text)
        n, costs, lengths = len(text), self._costs, self._lengths
        total, steps = [0.0] * (n + 1), [(1, -1)] * n  # cost of the rest; length and id of the token at each position
        for i in range(n - 1, -1, -1):
            best, step = math.inf, (1, -1)
            for length in lengths.get(text[i], ()):
                found = costs.get(text[i : i + length]) if i + length <= n else None
                if found is not None and found[0] + total[i + length] < best:
                    best, step = found[0] + total[i + length], (length, found[1])
            if _UNKNOWN_COST + total[i + 1] < best:
                best, step = _UNKNOWN_COST + total[i + 1], (1, -1)
            total[i], steps[i] = best, step
        at = 0
        while at < n:
            length, token = steps[at]
            if token >= 0:
                out.append(token)
            else:
                out += [self._bytes[byte] for byte in uni.to_bytes(text[at])]
            at += length


def _byte(vocab: Vocab, token: int, text: str) -> int:
    try:
        return int(text[3:5], 16)
    except ValueError:
        raise FormatError(
            f"{vocab.source}: tokenizer.ggml.tokens entry {token} has type byte, but {text!r} is not <0xNN>"
        ) from None
