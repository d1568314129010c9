"""How probably the token at a position of a draft is right, given that those before it are."""

from __future__ import annotations

from collections.abc import Sequence

_TEXT_DECAY, _ALL_DECAY = 0.95, 0.99  # weight of older observations, of one text and of all of one kind
_PRIOR, _PRIOR_WEIGHT = 0.5, 1.0
_BORROWED = 6.0  # observations that the less specific estimate counts as


class _Counts:
    def __init__(self, most: int, decay: float) -> None:
        self.right, self.seen = [0.0] * most, [0.0] * most
        self._decay = decay

    def observe(self, position: int, right: bool) -> None:
        self.right[position] = self.right[position] * self._decay + right
        self.seen[position] = self.seen[position] * self._decay + 1

    def mix(self, position: int, other: float, weight: float) -> float:
        return (self.right[position] + weight * other) / (self.seen[position] + weight)


class Acceptance:
    """Estimates by kind of draft and position, from all texts; and by text, where recent drafts weigh most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kinds: dict[str, _Counts] = {}
        self._texts: dict[tuple[int, str], _Counts] = {}

    def observe(self, text: int, kind: str, n_drafted: int, n_right: int) -> None:
        """Add a draft that was checked: its first `n_right` tokens were right, the next one was not."""
        of_kind = self._kinds.setdefault(kind, _Counts(self._most, _ALL_DECAY))
        of_text = self._texts.setdefault((text, kind), _Counts(self._most, _TEXT_DECAY))
        for i in range(min(n_drafted, n_right + 1, self._most)):
            of_kind.observe(i, i < n_right)
            of_text.observe(i, i < n_right)

    def chain(self, text: int, kind: str, n: int) -> Sequence[float]:
        """Return the probability that the first 1, 2, ... n tokens of a draft are all right."""
        of_kind, of_text = self._kinds.get(kind), self._texts.get((text, kind))
        out, all_right, before, here = [], 1.0, _PRIOR, _PRIOR
        for i in range(min(n, self._most)):
            before = of_kind.mix(i, before, _BORROWED if i else _PRIOR_WEIGHT) if of_kind is not None else before
            here = before if of_text is None else of_text.mix(i, before if not i else (before + here) / 2, _BORROWED)
            all_right *= here
            out.append(all_right)
        return out

    def forget(self, text: int) -> None:
        """Drop what is known of a finished text."""
        for key in [k for k in self._texts if k[0] == text]:
            del self._texts[key]
