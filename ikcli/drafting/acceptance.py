"""How probably the tokens of a draft are found and right, by position, given that those before them were."""

from __future__ import annotations

from dataclasses import dataclass

_TEXT_DECAY, _ALL_DECAY = 0.94, 0.99  # weight of older observations, of one text and of all of one kind
_PRIOR, _PRIOR_WEIGHT = 0.7, 4.0
_BORROWED = 6.0  # observations that the less specific estimate counts as
_NEXT = 6.0  # ... and that the position before does


class _Counts:
    def __init__(self, most: int, decay: float) -> None:
        self.hits, self.seen = [0.0] * most, [0.0] * most
        self._decay = decay

    def observe(self, n_asked: int, n_hit: int) -> None:
        """Add a run that went right `n_hit` times, and then wrong if more was asked.

        What is known of later positions ages, too: in time they are taken to be like earlier ones, and tried.
        """
        decay = self._decay
        self.hits = [h * decay for h in self.hits]
        self.seen = [s * decay for s in self.seen]
        for i in range(min(n_asked, n_hit + 1)):
            self.hits[i] += i < n_hit
            self.seen[i] += 1

    def mix(self, position: int, other: float, weight: float) -> float:
        return (self.hits[position] + weight * other) / (self.seen[position] + weight)


class _Kind:
    """What is known of one kind of drafts, in one text or in all."""

    def __init__(self, most: int, decay: float) -> None:
        self.right, self.found = _Counts(most, decay), _Counts(most, decay)


@dataclass(frozen=True, slots=True)
class Chain:
    """Probabilities that the first 1, 2, ... n tokens of a draft are found, and that they are also right."""

    found: tuple[float, ...]
    right: tuple[float, ...]


class Acceptance:
    """Estimates by kind of draft and position, from all texts; and by text, where recent drafts weigh most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._nothing = _Kind(most, 1.0)  # estimates of nothing seen are those they are mixed with
        self._kinds: dict[str, _Kind] = {}
        self._texts: dict[tuple[int, str], _Kind] = {}

    def observe(self, text: int, kind: str, n_asked: int, n_found: int, n_right: int) -> None:
        """Add a draft that was made and checked: its first `n_right` tokens were right, the next one was not."""
        of_kind = self._kinds.get(kind)
        if of_kind is None:
            of_kind = self._kinds[kind] = _Kind(self._most, _ALL_DECAY)
        of_text = self._texts.get((text, kind))
        if of_text is None:
            of_text = self._texts[text, kind] = _Kind(self._most, _TEXT_DECAY)
        for known in (of_kind, of_text):
            known.right.observe(n_asked, n_right)
            known.found.observe(n_asked, n_found)

    def chain(self, text: int, kind: str, n: int, *, hopeful: bool = False) -> Chain:
        """Return the estimates for a draft of n tokens; `hopeful`: at least what is right in the long run."""
        of_kind, of_text = self._kinds.get(kind), self._texts.get((text, kind))
        if hopeful and of_kind is not None and of_text is not None:
            long, here = (self._estimate(n, of_kind, known) for known in (None, of_text))
            return long if sum(long.right) > sum(here.right) else here
        return self._estimate(n, of_kind, of_text)

    def _estimate(self, n: int, of_kind: _Kind | None, of_text: _Kind | None) -> Chain:
        known = of_kind or self._nothing, of_text or self._nothing
        right = _chain(n, _PRIOR, known[0].right, known[1].right)
        return Chain(_chain(n, 1.0, known[0].found, known[1].found), right)

    def forget(self, text: int) -> None:
        """Drop what is known of a finished text."""
        for key in [k for k in self._texts if k[0] == text]:
            del self._texts[key]


def _chain(n: int, prior: float, of_kind: _Counts, of_text: _Counts) -> tuple[float, ...]:
    out, together, before, here = [], 1.0, prior, prior
    for i in range(n):
        before = of_kind.mix(i, before, _NEXT if i else _PRIOR_WEIGHT)
        here = of_text.mix(i, (before + here) / 2 if i and of_text.seen[0] else before, _BORROWED)
        together *= here
        out.append(together)
    return tuple(out)
