"""ngram-cache: counts of the tokens that follow one to four tokens, in the text and in two files.

The files, a dynamic one (`-lcd`) and a static one (`-lcs`), have llama.cpp's layout: per n-gram four int32 tokens (-1
where it is shorter), the int32 number of continuations, then the int32 token and int32 count of each. A static file
holds n-grams of two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ikcli.errors import FormatError, IkError
from ikcli.files import written_whole

Gram = tuple[int, ...]
Counts = dict[Gram, dict[int, int]]
LONGEST, STATIC = 4, 2
# By length of the n-gram: least number of observations and least share in percent of the most frequent continuation.
_TEXT_LIMITS = ((2, 66), (2, 50), (1, 50), (1, 50))
_FILE_LIMITS = ((4, 75), (3, 66), (2, 66), (2, 66))


def read_counts(path: Path) -> Counts:
    """Read the n-grams of a file; raise FormatError if it is truncated or holds impossible numbers."""
    try:
        words = np.frombuffer(path.read_bytes()[: path.stat().st_size // 4 * 4], dtype="<i4").tolist()
        odd = path.stat().st_size % 4
    except OSError as e:
        raise IkError(f"{path}: cannot read the n-gram file: {e.strerror or e}") from None
    counts: Counts = {}
    at = 0
    while at < len(words):
        n = words[at + LONGEST] if at + LONGEST < len(words) else -1
        end = at + LONGEST + 1 + 2 * n
        if odd or n <= 0 or end > len(words):
            raise FormatError(f"{path}: not an n-gram file, or cut off; -lcs and -lcd take files of n-gram counts")
        gram = tuple(t for t in words[at : at + LONGEST] if t >= 0)
        pairs = words[at + LONGEST + 1 : end]
        if not gram or min(pairs) < 0:
            raise FormatError(f"{path}: not an n-gram file: it holds negative counts or empty n-grams")
        counts[gram] = dict(zip(pairs[::2], pairs[1::2], strict=True))
        at = end
    return counts


def write_counts(counts: Counts, path: Path) -> None:
    """Write a file, completely or not at all."""
    words: list[int] = []
    for gram, follow in counts.items():
        words += (*gram, *[-1] * (LONGEST - len(gram)), len(follow))
        for pair in follow.items():
            words += pair
    try:
        with written_whole(path, private=True) as temporary:
            temporary.write_bytes(np.array(words, dtype="<i4").tobytes())
    except OSError as e:
        raise IkError(f"{path}: cannot write the n-gram file: {e.strerror or e}") from None


def merge(into: Counts, counts: Counts) -> None:
    """Add counts."""
    for gram, follow in counts.items():
        known = into.setdefault(gram, {})
        for token, n in follow.items():
            known[token] = known.get(token, 0) + n


class NgramCache:
    """Drafts tokens for one text; all texts share `dynamic` and `static`, which are only read here."""

    def __init__(self, dynamic: Counts, static: Counts) -> None:
        self._dynamic, self._static = dynamic, static
        self.counts: Counts = {}
        self._seen = 0

    def may(self, text: Sequence[int]) -> bool:
        self._grow(text)
        return self._next(text[-LONGEST:]) >= 0

    def draft(self, text: Sequence[int], n_max: int) -> list[int]:
        self._grow(text)
        end, out = list(text[-LONGEST:]), list[int]()
        while len(out) < n_max:
            token = self._next(end)
            if token < 0:
                break
            out.append(token)
            end = [*end, token][-LONGEST:]
        return out

    def _grow(self, text: Sequence[int]) -> None:
        if len(text) < self._seen:
            self.counts, self._seen = {}, 0
        for at in range(max(self._seen, 1), len(text)):
            for n in range(1, min(LONGEST, at) + 1):
                follow = self.counts.setdefault(tuple(text[at - n : at]), {})
                follow[text[at]] = follow.get(text[at], 0) + 1
        self._seen = len(text)

    def _next(self, end: Sequence[int]) -> int:
        """Return the token that probably follows, or -1: first by the text itself, then by the files."""
        static = self._static.get(tuple(end[-STATIC:]), {})
        for counts, limits in ((self.counts, _TEXT_LIMITS), (self._dynamic, _FILE_LIMITS)):
            for gram in _longest_first(end):
                token = _frequent(counts.get(gram, {}), static, *limits[len(gram) - 1])
                if token >= 0:
                    return token
        return _frequent(static, {}, *_TEXT_LIMITS[STATIC - 1])


def _longest_first(end: Sequence[int]) -> Iterator[Gram]:
    for n in range(min(LONGEST, len(end)), 0, -1):
        yield tuple(end[-n:])


def _frequent(follow: dict[int, int], static: dict[int, int], least: int, percent: int) -> int:
    """Return the most frequent continuation (weighted by the static counts), or -1 if it is not frequent enough."""
    if not follow:
        return -1
    token = max(follow, key=lambda t: follow[t] * static.get(t, 1))
    total = sum(follow.values())
    return token if total >= least and 100 * follow[token] >= percent * total else -1
