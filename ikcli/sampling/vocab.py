"""Collect what samplers need to know about a vocabulary, once per model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from ikcli.sampling.dry import Breakers, find_breakers
from ikcli.tokenizer import Tokenizer

_MOST_CACHED = 64


def _no_breakers(_: tuple[str, ...]) -> Breakers:
    return {}


@dataclass(frozen=True, slots=True)
class SamplerVocab:
    """Size, line feed, end-of-generation ids, and the token sequences of DRY's sequence breakers."""

    n_vocab: int
    newline: int | None = None
    eog: frozenset[int] = field(default_factory=frozenset)
    breakers: Callable[[tuple[str, ...]], Breakers] = _no_breakers

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, n_vocab: int | None = None) -> SamplerVocab:
        """Build from a tokenizer; give `n_vocab` if the model's output is wider than the vocabulary."""
        newline = tokenizer.newline_id if tokenizer.kind != "none" else None
        breakers = BreakerTable(tokenizer) if tokenizer.kind != "none" else _no_breakers
        return cls(n_vocab or tokenizer.n_vocab, newline, tokenizer.eog_ids, breakers)


class BreakerTable:
    """A cache of breaker token sequences: searching a vocabulary takes tens of milliseconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str] = []
        self._found: dict[str, Breakers] = {}
        self._lock = Lock()

    def __call__(self, texts: tuple[str, ...]) -> Breakers:
        """Return a table: first token -> the tokens that complete a breaker after it."""
        merged: dict[int, tuple[tuple[int, ...], ...]] = {}
        for text in texts:
            for token, tails in self._one(text).items():
                merged[token] = merged.get(token, ()) + tails
        return merged

    def _one(self, text: str) -> Breakers:
        with self._lock:
            if text not in self._found:
                if not self._pieces:
                    self._pieces = [self._tokenizer.token_text(i) for i in range(self._tokenizer.n_vocab)]
                if len(self._found) >= _MOST_CACHED:
                    self._found.clear()
                self._found[text] = find_breakers([text], self._pieces, self._encode)
            return self._found[text]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)
