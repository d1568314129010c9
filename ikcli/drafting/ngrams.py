"""Draft tokens from earlier text: the tokens that followed earlier occurrences of the last few tokens.

Each drafter gets the tokens of one text, prompt and output, and keeps an index that grows with it. A wrong draft costs
a little time and never changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Gram = tuple[int, ...]
_MOST_VALUES = 4  # continuations remembered per key by ngram-map-k4v


class Drafter(Protocol):
    """Drafts tokens for one text."""

    def may(self, text: Sequence[int]) -> bool:
        """Return whether `draft` may find something; in most steps nothing but this is asked."""

    def draft(self, text: Sequence[int], n_max: int) -> list[int]:
        """Return up to n_max tokens that may follow."""


class _Index:
    """Positions after every n-gram of a growing text, the latest `most` of them, the latest last."""

    __slots__ = ("_after", "_last", "_most", "_n", "_seen")

    def __init__(self, n: int, most: int) -> None:
        self._n, self._most = n, most
        self._after: dict[Gram, tuple[int, ...]] = {}
        self._seen = 0
        self._last: Gram = ()

    def find(self, text: Sequence[int]) -> tuple[int, ...]:
        """Index new tokens; return the positions after earlier occurrences of the text's last n-gram."""
        n, after, seen, end = self._n, self._after, self._seen, len(text)
        if end != seen:
            if end < seen:
                after.clear()
                seen = 0
            for at in range(max(seen, n), end):  # no token follows the last n-gram yet
                gram = self._last if at == seen else tuple(text[at - n : at])
                places = after.get(gram)
                after[gram] = (at,) if places is None else (*places, at)[-self._most :]
            self._seen = end
            self._last = tuple(text[end - n :]) if end >= n else ()
        return after.get(self._last, ())


class NgramMap:
    """ngram-simple, ngram-map-k: draft what followed the latest occurrence, if there were `min_hits`."""

    def __init__(self, size_n: int, size_m: int, min_hits: int) -> None:
        self._size_m, self._min_hits = size_m, max(min_hits, 1)
        self._index = _Index(size_n, self._min_hits)

    def may(self, text: Sequence[int]) -> bool:
        return len(self._index.find(text)) >= self._min_hits

    def draft(self, text: Sequence[int], n_max: int) -> list[int]:
        places = self._index.find(text)
        if len(places) < self._min_hits:
            return []
        return list(text[places[-1] : places[-1] + min(n_max, self._size_m)])


class NgramMapValues:
    """ngram-map-k4v: draft the most frequent of the latest continuations, if it beats all others together."""

    def __init__(self, size_n: int, size_m: int, min_hits: int) -> None:
        self._index = _Index(size_n, 4 * _MOST_VALUES)
        self._size_m, self._min_hits = size_m, min_hits

    def may(self, text: Sequence[int]) -> bool:
        return bool(self._index.find(text))

    def draft(self, text: Sequence[int], n_max: int) -> list[int]:
        counts: dict[Gram, int] = {}
        for at in self._index.find(text):
            value = tuple(text[at : at + min(n_max, self._size_m)])
            counts[value] = counts.get(value, 0) + 1
        if not counts:
            return []
        best = max(counts, key=lambda v: counts[v])
        others = sum(counts.values()) - counts[best]
        return list(best) if counts[best] >= max(self._min_hits, others) else []


class Pool:
    """The memory of ngram-mod: n-gram -> next token, shared by all texts of the server; bounded."""

    def __init__(self, n: int, most: int = 1 << 20) -> None:
        self.n, self.most = n, most
        self.next: dict[Gram, int] = {}

    def add(self, gram: Gram, token: int) -> None:
        if len(self.next) >= self.most:
            self.next.clear()
        self.next[gram] = token


class NgramPool:
    """ngram-mod: follow a pool token by token."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._seen = pool, 0

    def may(self, text: Sequence[int]) -> bool:
        pool = self._pool
        n, start = pool.n, self._seen if self._seen <= len(text) else 0
        for end in range(max(start, n), len(text)):
            pool.add(tuple(text[end - n : end]), text[end])
        self._seen = len(text)
        return tuple(text[-n:]) in pool.next

    def draft(self, text: Sequence[int], n_max: int) -> list[int]:
        if not self.may(text):
            return []
        n = self._pool.n
        gram, out = tuple(text[-n:]), list[int]()
        while len(out) < n_max and (token := self._pool.next.get(gram)) is not None:
            out.append(token)
            gram = (*gram[1:], token)
        return out


class Suffix:
    """suffix: the longest earlier match of the end of the text decides; a longer match drafts more."""

    def __init__(self, least: int, most: int) -> None:
        self._n, self._index, self._most = least, _Index(least, 64), most

    def may(self, text: Sequence[int]) -> bool:
        return bool(self._index.find(text))

    def draft(self, text: Sequence[int], n_max: int) -> list[int]:
        places = self._index.find(text)
        if not places:
            return []
        length, at = max((self._match(text, place), place) for place in places)
        return list(text[at : at + min(n_max, length)])

    def _match(self, text: Sequence[int], place: int) -> int:
        """Return the number of equal tokens before `place` and before the end."""
        n = self._n
        while n < min(self._most, place) and text[place - n - 1] == text[len(text) - n - 1]:
            n += 1
        return n
