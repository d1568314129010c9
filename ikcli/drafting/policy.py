"""Decide how many drafted tokens to check in a step: as many as give the most tokens per second, often none.

The policy sees counts and seconds only; it reads no clock and draws no random numbers. Two rules bound what drafting
can cost. An account gains a small share of the time of every step and of what drafts saved, and pays what they cost:
when it cannot pay for a draft that turns out wrong, nothing is drafted. And a draft that the estimates advise against
is tried now and then, since texts change: the more it costs, and the more often it failed, the more steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.drafting.acceptance import Acceptance
from ikcli.drafting.costs import Curve

SHARE = 0.01  # of the time of plain steps that drafts may cost
_START, _MOST = 2.5, 12.0  # the account, in plain steps: at first, and at most
_ROW_SLOPE = 0.05  # cost of a row before any was measured: low, so that it is measured
_DRAFT_SLOPE = 1.0
_UNUSUAL = 2.0  # the account pays at most this many times the estimate: more is the machine's doing, not the draft's
_RESERVE = 1.0  # of the account that frequent tries leave
_LEAST_WAIT, _MOST_PATIENCE = 4, 2.0  # steps between two tries; factor by which failures lengthen them


@dataclass(frozen=True, slots=True)
class Option:
    """A draft that a text can get: its kind, its most tokens, and whether making it takes time that depends on them."""

    text: int
    kind: str
    n_most: int
    costs: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Tokens to draft for every option, and why: tokens/s expected of this, and of no draft."""

    lengths: tuple[int, ...]
    reason: str
    expected: float = 0.0
    plain: float = 0.0


class Policy:
    """The cost model of the drafts of one engine."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.rows = Curve(most_rows, _ROW_SLOPE)
        self.acceptance = Acceptance(most_rows)
        self._drafting: dict[str, Curve] = {}
        self._account = _START
        self._repair = 0.0  # seconds that taking back a wrong draft costs
        self._steps = 0  # without a draft
        self._patience = 1.0
        self._trying = False

    # --- observations -----------------------------------------------------------------------------------------------
    def checked(self, rows: int, seconds: float, n_texts: int, n_tokens: int) -> None:
        """Note a step: rows computed, seconds without the making of drafts, texts, tokens they gained."""
        usual = self.rows(rows)
        self.rows.observe(rows, seconds)
        if usual > 0:
            seconds = min(seconds, _UNUSUAL * usual)
        plain = self.rows(n_texts)
        if rows > n_texts:
            self._steps = 0
            self._pay(seconds, n_tokens / n_texts, plain)
            if self._trying:
                gained = n_tokens / n_texts * plain > seconds
                self._patience = 1.0 if gained else min(2 * self._patience, _MOST_PATIENCE)
        else:
            self._steps += 1
            self._account = min(self._account + SHARE, _MOST)

    def _pay(self, seconds: float, tokens: float, plain: float) -> None:
        if plain > 0:
            self._account = min(self._account + tokens - seconds / plain, _MOST)

    def drafted(self, kind: str, n: int, seconds: float) -> None:
        """Note the seconds that making drafts of up to n tokens took."""
        curve = self._drafting.setdefault(kind, Curve(self.most_rows, _DRAFT_SLOPE))
        usual = curve(n)
        curve.observe(n, seconds)
        if usual > 0:
            seconds = min(seconds, _UNUSUAL * usual)
        plain = self.rows(1)
        if plain > 0:
            self._account -= seconds / plain

    def repaired(self, seconds: float) -> None:
        """Note the seconds beyond a plain step's that it took to compute again what a wrong draft had overwritten."""
        self._repair += 0.2 * (seconds - self._repair)
        if (plain := self.rows(1)) > 0:
            self._account -= seconds / plain

    def judged(self, text: int, kind: str, n_drafted: int, n_right: int) -> None:
        """Note how much of a draft was right."""
        self.acceptance.observe(text, kind, n_drafted, n_right)

    # --- decisions --------------------------------------------------------------------------------------------------
    def decide(self, options: Sequence[Option], n_texts: int) -> Decision:
        """Choose the lengths of the drafts of a step in which `n_texts` texts, those of `options` among them, go on."""
        none = (0,) * len(options)
        self._trying = False
        if not options:
            return Decision(none, "no draft")
        plain = self.rows(n_texts)
        if not plain or not self.rows.measured(n_texts):
            return Decision(none, "the time of a step without drafts is measured first")
        chains = [self.acceptance.chain(o.text, o.kind, o.n_most) for o in options]
        rate, lengths = self._best(options, chains, n_texts)
        base = n_texts / plain
        if rate > base:
            if self._worst(options, lengths, n_texts) <= self._account:
                return Decision(lengths, "pays", rate, base)
            while sum(lengths) > 1:  # a shorter draft that the account can pay
                lengths = _one_less(lengths, chains)
                if self._worst(options, lengths, n_texts) <= self._account:
                    return Decision(lengths, "shortened: recent drafts cost time", rate, base)
        best = max(range(len(options)), key=lambda i: chains[i][0] if chains[i] else -1.0)
        tried = tuple(int(i == best) for i in range(len(options)))
        price = self._worst(options, tried, n_texts)
        rich = self._account - price >= _RESERVE  # tries are paid from what is left of the account
        wait = _LEAST_WAIT if rich else max(_LEAST_WAIT, self._patience * price / SHARE)
        if options[best].n_most and self._steps >= wait:
            self._trying = True
            return Decision(tried, "a try", rate, base)
        if rate > base:
            return Decision(none, "recent drafts cost time", rate, base)
        return Decision(none, "does not pay", rate, base)

    def value(self, option: Option, n_texts: int) -> float:
        """Return the tokens per second if this draft were the only one of a step."""
        return self._best([option], [self.acceptance.chain(option.text, option.kind, option.n_most)], n_texts)[0]

    def _best(
        self, options: Sequence[Option], chains: Sequence[Sequence[float]], n_texts: int
    ) -> tuple[float, tuple[int, ...]]:
        """Return the best tokens per second and its lengths: rows go where they are most probably right."""
        lengths = [0] * len(options)
        tokens = float(n_texts)
        best, found = 0.0, tuple(lengths)
        for rows in range(n_texts + 1, self.most_rows + 1):
            at = max(
                (i for i, chain in enumerate(chains) if lengths[i] < len(chain)),
                key=lambda i: chains[i][lengths[i]],
                default=-1,
            )
            if at < 0:
                break
            tokens += chains[at][lengths[at]]
            lengths[at] += 1
            wrong = 1 - min((c[n - 1] for c, n in zip(chains, lengths, strict=True) if n), default=1.0)
            seconds = self.rows(rows) + self._making(options, lengths) + wrong * self._repair
            if tokens / seconds > best:
                best, found = tokens / seconds, tuple(lengths)
        return best, found

    def _making(self, options: Sequence[Option], lengths: Sequence[int]) -> float:
        """Return the seconds that making these drafts takes; texts of a kind are drafted together."""
        longest: dict[str, int] = {}
        for o, n in zip(options, lengths, strict=True):
            if o.costs and n:
                longest[o.kind] = max(longest.get(o.kind, 0), n)
        total = 0.0
        for kind, n in longest.items():
            curve = self._drafting.get(kind)
            total += curve(n) if curve else _ROW_SLOPE * n * self.rows(1)
        return total

    def _worst(self, options: Sequence[Option], lengths: Sequence[int], n_texts: int) -> float:
        """Return what these drafts cost if all of them are wrong, in plain steps."""
        plain = self.rows(n_texts)
        seconds = self.rows(n_texts + sum(lengths)) + self._making(options, lengths) + self._repair
        return seconds / plain - 1


def _one_less(lengths: tuple[int, ...], chains: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Drop the least probable token."""
    at = min((i for i, n in enumerate(lengths) if n), key=lambda i: chains[i][lengths[i] - 1])
    return tuple(n - (i == at) for i, n in enumerate(lengths))
