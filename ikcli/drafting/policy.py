"""Decide how many drafted tokens to check in a step: as many as give the most tokens per second, often none.

The policy sees counts and seconds only; it reads no clock and draws no random numbers. Two rules bound what drafting
can cost. An account gains a small share of the time of every step and of what drafts saved, and pays what they cost,
and what looking for drafts costs: nothing is drafted that it cannot pay. And a draft that the estimates advise against
is tried now and then, since texts change: the more it costs, and the more often it failed, the more steps later.

Estimates change slowly, so what they say of a set of drafts is kept for a few steps, and steps between tries ask
nothing: deciding takes a microsecond or two where steps take hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.drafting.acceptance import Acceptance, Chain
from ikcli.drafting.costs import MakingCosts, RowCosts, between

SHARE = 0.01  # of the time of plain steps that drafts may cost
_START, _MOST = 1.5, 24.0  # the account, in plain steps: at first, and at most
_RICH = 5.0
_OVERDRAFT = 0.5  # plain steps that a draft which is probably right may cost beyond the account
_RESERVE = 0.5  # of the account that looking for drafts leaves for those that are found
_UNUSUAL = 2.0  # the account pays at most this many times the estimate: more is the machine's doing, not the draft's
_MARGIN = 1.01  # by which drafts have to be faster
_MOST_PATIENCE = 4.0  # factor by which failed tries delay the next one
_EXCESS = 100.0  # steps over which tries spend what the account has beyond its start
_SURE = 2  # measurements of a number of rows, before which the less it may take counts
_REST = 12  # most steps without looking for drafts
_AGAIN = 256  # steps after which a step without drafts is measured again
_REFRESH, _KEPT = 48, 6  # steps, and drafts, after which estimates are computed again
_UNKNOWN = 0.25  # plain steps that making a draft is assumed to take at most before one was made, each token
_PREDICTABLE = 0.85  # acceptance in a text in which drafts should pay, for which tries look
_REPAIR = 1.0  # ... and taking back a wrong one, where that computes something


@dataclass(frozen=True, slots=True)
class Option:
    """A draft that a text can get: its kind, its most tokens, and the fewest that are worth it.

    `costs`: making it takes time that depends on its length.
    """

    text: int
    kind: str
    n_most: int
    costs: bool = False
    n_least: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """Tokens to draft for every option, and why: tokens/s expected of this, and of no draft."""

    lengths: tuple[int, ...]
    reason: str
    expected: float = 0.0
    plain: float = 0.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Lengths of drafts, and what they promise.

    `rate`: tokens per second. `worst`: plain steps lost if all are wrong; `risk`: the same by its probability; `hope`:
    plain steps won in a predictable text.
    """

    lengths: tuple[int, ...]
    rate: float
    worst: float
    risk: float
    hope: float


class Policy:
    """The cost model of the drafts of one engine.

    `experts`: number of experts and of those that a row uses. `repairs`: taking back a wrong draft computes something.
    """

    def __init__(self, most_rows: int, *, experts: tuple[int, int] | None = None, repairs: bool = False) -> None:
        self.most_rows = most_rows
        self.rows = RowCosts(most_rows, experts)
        self.acceptance = Acceptance(most_rows)
        self.account = _START
        self._making: dict[str, MakingCosts] = {}
        self._repair = -1.0 if repairs else 0.0  # seconds; below 0: not known yet
        self._waited = 0  # steps since the last draft
        self._rest = 0
        self._looking = 0.0  # plain steps that looking for drafts takes
        self._patience = 1.0
        self._trying = False
        self._n_steps = self._n_judged = 0
        self._candidates: dict[tuple[int, bool, tuple[Option, ...]], list[_Candidate]] = {}

    # --- observations -----------------------------------------------------------------------------------------------
    def checked(self, rows: int, seconds: float, n_texts: int, n_tokens: int) -> None:
        """Note a step: rows computed, seconds without the making of drafts, texts, tokens they gained."""
        costs = self.rows
        costs.observe(rows, seconds)
        self._n_steps += 1
        if costs.n_measured(rows) <= 3 or not self._n_steps % _REFRESH:
            costs.refresh()
            self._candidates.clear()
        if rows == n_texts:
            self._waited += 1
            self._rest -= 1
            self._earn(SHARE)
            return
        self._waited = 0
        plain = costs.seconds[n_texts]
        gained = n_tokens / n_texts - min(seconds, _UNUSUAL * costs.seconds[rows]) / plain
        self._earn(gained)
        if self._trying:
            self._patience = 1.0 if gained > 0 else min(2 * self._patience, _MOST_PATIENCE)

    def _earn(self, steps: float) -> None:
        self.account = min(self.account + steps, _MOST)

    def spent(self, seconds: float, n_texts: int) -> None:
        """Note seconds that a step took beyond its computation."""
        if (plain := self.rows.seconds[n_texts]) > 0:
            self.account -= min(seconds / plain, _UNUSUAL)

    def looked(self, seconds: float, n_texts: int) -> None:
        """Note the seconds that looking for drafts and deciding took."""
        if (plain := self.rows.seconds[n_texts]) > 0:
            steps = min(seconds / plain, 1.0)
            self._looking += 0.2 * (steps - self._looking)
            self.account -= min(steps, 2 * self._looking)

    def drafted(self, kind: str, n: int, seconds: float, n_texts: int) -> None:
        """Note the seconds that making drafts of up to n tokens took."""
        known = self._making.setdefault(kind, MakingCosts())
        usual = known(n) if known else seconds
        known.observe(n, seconds)
        self.spent(min(seconds, _UNUSUAL * usual), n_texts)

    def repaired(self, seconds: float, n_texts: int) -> None:
        """Note the seconds that it took to compute again what a wrong draft had overwritten."""
        self._repair = seconds if self._repair < 0 else self._repair + 0.2 * (seconds - self._repair)
        self.spent(seconds, n_texts)

    def judged(self, text: int, kind: str, n_asked: int, n_found: int, n_right: int) -> None:
        """Note how much of a draft was found, and right."""
        self.acceptance.observe(text, kind, n_asked, n_found, n_right)
        self._n_judged += 1
        if not n_right or not self._n_judged % _KEPT:
            self._candidates.clear()

    def forget(self, text: int) -> None:
        """Drop what is known of a finished text; what it saved does not pay for the next one."""
        self.acceptance.forget(text)
        self.account = min(self.account, _START)
        self._candidates.clear()

    # --- decisions --------------------------------------------------------------------------------------------------
    @property
    def resting(self) -> bool:
        """Whether this step needs no decision: there should be no drafts, nor should any be looked for."""
        return self._rest > 0 or self.account < (_RESERVE if self._looking > SHARE else 0)

    def decide(self, options: Sequence[Option], n_texts: int) -> Decision:
        """Choose the lengths of the drafts of a step in which `n_texts` texts, those of `options` among them, go on."""
        none = (0,) * len(options)
        self._trying = False
        if not options:
            return Decision(none, "no draft")
        if self.rows.n_measured(n_texts) < 2:
            return Decision(none, "the time of a step without drafts is measured first")
        base = n_texts / self.rows.seconds[n_texts]
        hopeful = self.account > _RICH
        key = n_texts, hopeful, tuple(options)
        candidates = self._candidates.get(key)
        if candidates is None:
            candidates = self._candidates[key] = self._all(options, n_texts, hopeful)
        if not candidates:
            return Decision(none, "no draft")
        best = max(candidates, key=_rate)
        if best.rate > _MARGIN * base:
            if best.rate < 1.5 * base and self.rows.age(n_texts) > _AGAIN:
                return Decision(none, "the time of a step without drafts is measured again", best.rate, base)
            if self._pays(best):
                return Decision(best.lengths, "pays", best.rate, base)
            payable = [c for c in candidates if c.rate > _MARGIN * base and self._pays(c)]
            if payable:
                best = max(payable, key=_rate)
                return Decision(best.lengths, "shortened: recent drafts cost time", best.rate, base)
            self._rest = 1
            return Decision(none, "recent drafts cost time", best.rate, base)
        tried = max(candidates, key=_promise)
        wait = self._patience * tried.worst / (SHARE + max(self.account - _START, 0) / _EXCESS)
        if self._waited >= wait and tried.worst <= self.account and tried.hope > 0:
            self._trying = True
            return Decision(tried.lengths, "a try", best.rate, base)
        self._rest = max(1, min(_REST, int(wait) - self._waited))
        return Decision(none, "does not pay", best.rate, base)

    def value(self, option: Option, n_texts: int) -> float:
        """Return the tokens per second if this draft were the only one of a step."""
        key = n_texts, False, (option,)
        if key not in self._candidates:
            self._candidates[key] = self._all((option,), n_texts, False)
        return max((c.rate for c in self._candidates[key]), default=0.0)

    def _pays(self, c: _Candidate) -> bool:
        """Return whether the account can pay for these drafts."""
        return c.risk <= self.account and c.worst <= self.account + _OVERDRAFT

    def _all(self, options: Sequence[Option], n_texts: int, hopeful: bool) -> list[_Candidate]:
        """Return what 1, 2, ... further rows promise; they go where they are most probably right."""
        chains = [self.acceptance.chain(o.text, o.kind, o.n_most, hopeful=hopeful) for o in options]
        lengths = [0] * len(options)
        tokens, rows, hoped = float(n_texts), float(n_texts), 0.0
        plain = self.rows.seconds[n_texts]
        if not plain:
            return []
        choice = [low if self.rows.n_measured(k) < _SURE else mean
                  for k, (mean, low) in enumerate(zip(self.rows.seconds, self.rows.low, strict=True))]  # fmt: skip
        repair = self._repair if self._repair >= 0 else _REPAIR * plain
        found: list[_Candidate] = []
        for n_rows in range(n_texts + 1, self.most_rows + 1):
            at = max(
                (i for i, c in enumerate(chains) if lengths[i] < len(c.right)),
                key=lambda i: chains[i].right[lengths[i]],
                default=-1,
            )
            if at < 0:
                break
            tokens += chains[at].right[lengths[at]]
            rows += chains[at].found[lengths[at]]
            lengths[at] += 1
            hoped += _PREDICTABLE ** lengths[at]
            if any(0 < n < o.n_least for o, n in zip(options, lengths, strict=True)):
                continue
            used = [(o, c, n) for o, c, n in zip(options, chains, lengths, strict=True) if n]
            wrong = 1 - min(c.right[n - 1] for _, c, n in used)
            seconds = between(choice, rows) + self._to_make(used, plain, 0.5) + wrong * repair
            worst = (self.rows.high[n_rows] + self._to_make(used, plain, 1.0) + repair) / plain - 1
            risk = worst * (1 - min(c.right[0] for _, c, _ in used))
            hope = hoped / n_texts - worst
            found.append(_Candidate(tuple(lengths), tokens / seconds, worst, risk, hope))
        return found

    def _to_make(self, used: Sequence[tuple[Option, Chain, int]], plain: float, share: float) -> float:
        """Return the seconds that making these drafts takes; texts of a kind are drafted together."""
        longest: dict[str, float] = {}
        for o, c, n in used:
            if o.costs:
                longest[o.kind] = max(longest.get(o.kind, 0.0), 1 + sum(c.found[: n - 1]))
        total = 0.0
        for kind, length in longest.items():
            known = self._making.get(kind)
            total += known(length) if known else share * _UNKNOWN * length * plain
        return total


def _rate(c: _Candidate) -> float:
    return c.rate


def _promise(c: _Candidate) -> float:
    """Return what a try may find, by its price."""
    return c.hope / max(c.worst, SHARE)
