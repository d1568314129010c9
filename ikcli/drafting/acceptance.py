"""How probably the tokens of a draft are found and right, by position, given that those before them were."""

from __future__ import annotations

from dataclasses import dataclass

_TEXT_DECAY, _ALL_DECAY = 0.94, 0.99  # weight of older observations, of one text and of all of one kind
_PRIOR, _PRIOR_WEIGHT = 0.7, 4.0
_BORROWED = 6.0  # observations that the less specific estimate counts as
_NEXT = 6.0  # ... and that the position before does
_LARGE = 1e30


class _Counts:
    """Observations by position, in units that grow with every one: so all older ones weigh less, and none is touched.

    What is known of later positions ages, too: in time they are taken to be like earlier ones, and tried.
    """

    __slots__ = ("_growth", "hits", "seen", "unit")

    def __init__(self, most: int, decay: float) -> None:
        self.hits, self.seen = [0.0] * most, [0.0] * most
        self.unit, self._growth = 1.0, 1 / decay

    def observe(self, n_asked: int, n_hit: int) -> None:
        """Add a run that went right `n_hit` times, and then wrong if more was asked."""
        self.unit = unit = self.unit * self._growth
        hits, seen = self.hits, self.seen
        for i in range(n_hit):
            hits[i] += unit
            seen[i] += unit
        if n_hit < n_asked:
            seen[n_hit] += unit
        if unit > _LARGE:
            self.hits, self.seen = [h / unit for h in hits], [s / unit for s in seen]
            self.unit = 1.0


class _Known:
    """Observations of one kind of draft, in one text or in all. `found` is set once a draft was shorter than asked."""

    __slots__ = ("_decay", "_most", "found", "right")

    def __init__(self, most: int, decay: float) -> None:
        self._most, self._decay = most, decay
        self.right = _Counts(most, decay)
        self.found: _Counts | None = None

    def observe(self, n_asked: int, n_found: int, n_right: int) -> None:
        self.right.observe(n_asked, n_right)
        if self.found is None and n_found < n_asked:
            self.found = _Counts(self._most, self._decay)
        if self.found is not None:
            self.found.observe(n_asked, n_found)


@dataclass(frozen=True, slots=True)
class Chain:
    """Probabilities that the first 1, 2, ... n tokens of a draft are found, and that they are also right."""

    found: tuple[float, ...]
    right: tuple[float, ...]


class Acceptance:
    """Estimates by kind of draft and position, from all texts; and by text, where recent drafts weigh most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._nothing = _Counts(most, 1.0)  # estimates of nothing seen are those they are mixed with
        self._kinds: dict[str, _Known] = {}
        self._texts: dict[tuple[int, str], _Known] = {}

    def observe(self, text: int, kind: str, n_asked: int, n_found: int, n_right: int) -> None:
        """Add a draft that was made and checked: its first `n_right` tokens were right, the next one was not."""
        of_kind = self._kinds.get(kind)
        if of_kind is None:
            of_kind = self._kinds[kind] = _Known(self._most, _ALL_DECAY)
        of_text = self._texts.get((text, kind))
        if of_text is None:
            of_text = self._texts[text, kind] = _Known(self._most, _TEXT_DECAY)
        of_kind.observe(n_asked, n_found, n_right)
        of_text.observe(n_asked, n_found, n_right)

    def chain(self, text: int, kind: str, n: int, *, hopeful: bool = False) -> Chain:
        """Return the estimates for a draft of n tokens; `hopeful`: at least what is right in the long run."""
        of_kind, of_text = self._kinds.get(kind), self._texts.get((text, kind))
        if hopeful and of_kind is not None and of_text is not None:
            long, here = (self._estimate(n, of_kind, known) for known in (None, of_text))
            return long if sum(long.right) > sum(here.right) else here
        return self._estimate(n, of_kind, of_text)

    def _estimate(self, n: int, of_kind: _Known | None, of_text: _Known | None) -> Chain:
        none = self._nothing
        right = _chain(n, _PRIOR, of_kind.right if of_kind else none, of_text.right if of_text else none)
        found = of_kind.found if of_kind else None
        if found is None:
            return Chain((1.0,) * n, right)
        here = of_text.found if of_text else None
        return Chain(_chain(n, 1.0, found, here or none), right)

    def forget(self, text: int) -> None:
        """Drop what is known of a finished text."""
        for key in [k for k in self._texts if k[0] == text]:
            del self._texts[key]


def _chain(n: int, prior: float, of_kind: _Counts, of_text: _Counts) -> tuple[float, ...]:
    kind_hits, kind_seen, weight = of_kind.hits, of_kind.seen, _PRIOR_WEIGHT * of_kind.unit
    text_hits, text_seen, borrowed = of_text.hits, of_text.seen, _BORROWED * of_text.unit
    out, together, before, here = [], 1.0, prior, prior
    for i in range(n):
        before = (kind_hits[i] + weight * before) / (kind_seen[i] + weight)
        other = (before + here) / 2 if i and text_seen[0] else before
        here = (text_hits[i] + borrowed * other) / (text_seen[i] + borrowed)
        together *= here
        out.append(together)
        if not i:
            weight = _NEXT * of_kind.unit
    return tuple(out)
