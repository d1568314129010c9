"""Decide how many drafted tokens to check in a step: as many as give the most tokens per second, often none.

The policy sees counts and seconds only; it reads no clock and draws no random numbers. Two rules bound what drafting
can cost. An account gains a small share of the time of every step and of what drafts saved, and pays what they cost,
and what looking for drafts costs: nothing is drafted that it cannot pay. And a draft that the estimates advise against
is tried now and then, since texts change: the more it costs, and the more often it failed, the more steps later.
Drafts that cost nothing to make teach without being checked: the caller compares those that are not used with the text
(`judged`), and the first ones of an engine are compared only.

Estimates change slowly, so what they say of a set of drafts is kept for a few steps. A decision against drafts says for
how many steps it stands, twice as many every time: nothing is asked meanwhile, nor measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ikcli.drafting.acceptance import Acceptance
from ikcli.drafting.costs import MakingCosts, RowCosts, between

PAYS, TRY, SHORTENED = "pays", "try", "shortened: recent drafts cost time"
DOES_NOT_PAY, TOO_DEAR = "does not pay", "recent drafts cost time"
MEASURES, NO_DRAFT, RESTS = "measures a step without drafts", "no draft", "rests: drafts did not pay"
COMPARES = "compares first drafts with the text"
DECISIONS = (PAYS, TRY, SHORTENED, DOES_NOT_PAY, TOO_DEAR, MEASURES, NO_DRAFT, RESTS, COMPARES)

SHARE = 0.01  # of the time of plain steps that drafts may cost
_START, _MOST = 1.0, 24.0  # the account, in plain steps: at first, and at most
_CARRIED = 2.0  # ... at most, into the next text
_RICH = 5.0
_OVERDRAFT = 2.0  # plain steps that a draft which is probably right may cost beyond the account, if it is wrong
_RISK = 1.0  # ... times the probability of that
_RESERVE = 0.5  # of the account that looking for drafts leaves for those that are found
_UNUSUAL = 2.0  # the account pays at most this many times the estimate: more is the machine's doing, not the draft's
_COMPARED = 2  # drafts of an engine that are compared with the text before one is checked, if making them is free
_DEAR = 1.5  # factor by which tries that are dearer than a text's own means wait longer: costs may be misjudged, too
_MARGIN = 1.01  # by which drafts have to be faster
_MOST_PATIENCE = 4.0  # factor by which failed tries delay the next one
_EXCESS = 100.0  # steps over which tries spend what the account has beyond its start
_SURE = 2  # measurements of a number of rows, before which the less it may take counts
_FIRST_REST, _REST = 4, 64  # steps for which decisions against drafts stand: the first one, and the longest
_LOOK_REST = 12  # ... the longest of those that save the means to look for drafts, where looking is cheap
_RECOVERS = 2.0  # ... else, times what the account needs for the next look
_NEXT_REST = 16  # ... the first one of a text, after texts in which drafts did not pay; and all of drafts from texts
_WELL_KNOWN = 8  # measurements of a step without drafts, after which every `_SAMPLED`th such step is measured
_SAMPLED = 8
_AGAIN, _OFTEN = 32, 6  # drafts after which a step without one is measured again: at most, and times its measurements
_REFRESH, _SELDOM = 16, 512  # measurements after which costs are computed again: at first, and later
_KEPT, _EARLY = 6, 6  # drafts after which estimates are computed again, and first drafts that all do this
_WRONG = 3  # drafts that a wrong first token counts as
_UNKNOWN = 0.25  # plain steps that making a draft is assumed to take at most before one was made, each token
_PREDICTABLE = 0.85  # acceptance in a text in which drafts should pay, for which tries look
_VERY = 0.95  # ... in one in which even those should pay that are dear
_HOPED, _HOPED_OF_DEAR = ([sum(p**i for i in range(1, n + 1)) for n in range(129)] for p in (_PREDICTABLE, _VERY))
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
    """Tokens to draft for every option, and why: tokens/s expected of this, and of no draft, at the usual pace.

    `rest`: following steps that should not look for drafts. `compared`: tokens of drafts that are to be made, but only
    compared with the text as it goes on (`judged`).
    """

    lengths: tuple[int, ...]
    reason: str
    expected: float = 0.0
    plain: float = 0.0
    rest: int = 0
    compared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class _Rung:
    """Lengths of drafts, by the tokens per second they promise.

    `worst`: plain steps lost if all are wrong; `risk`: the same by its probability; `making`: those of making them.
    """

    rate: float
    lengths: tuple[int, ...]
    worst: float
    risk: float
    making: float

    def hope(self, n_texts: int, hoped: Sequence[float], price: float) -> float:
        """Return what these drafts gain in a text where they pay, by the price of a try."""
        return (sum(hoped[n] for n in self.lengths) / n_texts - self.worst) / max(price, SHARE)


class _Outlook:
    """The decisions that a set of drafts allows, kept until estimates change.

    `paying`: decisions for drafts that pay, the best first, with their worst loss and risk. `tried`: the draft that
    tries take if there are none, with its price and what it promises; `compares`: it is only compared with the text.
    `base`: tokens/s without drafts.
    """

    __slots__ = ("base", "compares", "paying", "price", "promise", "rate", "tried")

    def __init__(self, rungs: Sequence[_Rung], n_texts: int, base: float) -> None:
        self.base, self.rate = base, max(rung.rate for rung in rungs)
        least, reason = _MARGIN * base, PAYS
        self.paying: list[tuple[Decision, float, float]] = []
        for rung in sorted(rungs, reverse=True):
            if rung.rate <= least:
                break
            self.paying.append((Decision(rung.lengths, reason, rung.rate, base), rung.worst, rung.risk))
            reason = SHORTENED
        self.promise, self.price, self.tried, self.compares = 0.0, 0.0, rungs[0], False
        if self.paying:
            return
        # What a text is to pay from its own means must not be dearer than these can become, if there is a choice.
        cheap = [(hope, rung) for rung in rungs
                 if rung.worst <= _START and (hope := rung.hope(n_texts, _HOPED, rung.worst)) > 0]  # fmt: skip
        if cheap:
            self.promise, self.tried = max(cheap)
            self.price = self.tried.worst
        else:
            self.compares = rungs[0].making > 0
            prices = [rung.making if self.compares else _DEAR * rung.worst for rung in rungs]
            self.promise, self.price, self.tried = max(
                (rung.hope(n_texts, _HOPED_OF_DEAR, price), price, rung)
                for rung, price in zip(rungs, prices, strict=True)
            )


class Policy:
    """The cost model of the drafts of one engine.

    `experts`: number of experts and of those that a row uses. `repairs`: taking back a wrong draft computes something.
    """

    def __init__(self, most_rows: int, *, experts: tuple[int, int] | None = None, repairs: bool = False) -> None:
        self.most_rows = most_rows
        self.rows = RowCosts(most_rows, experts)
        self.acceptance = Acceptance(most_rows)
        self.account = _START  # plain steps
        self._making: dict[str, MakingCosts] = {}
        self._repair = -1.0 if repairs else 0.0  # seconds; below 0: not known yet
        self._waited = 0  # steps since the last draft
        self._rest = _FIRST_REST
        self._reserve = _RESERVE
        self._looking = 0.0  # plain steps that looking for drafts takes
        self._patience = 1.0
        self._trying = False
        self._compared: set[int] = set()  # texts with a try that is compared
        self._n_steps = self._n_judged = self._n_known = self._n_news = 0  # `_n_judged` of a text, `_n_known` of all
        self._refresh_at = self._next_refresh = _REFRESH
        self._choice: list[float] = []  # seconds by rows, as decisions see them
        self._ladders: dict[tuple[int, bool, str, int, int], list[_Rung]] = {}  # of one text
        self._outlooks: dict[tuple[int, bool, tuple[Option, ...]], _Outlook] = {}

    # --- observations -----------------------------------------------------------------------------------------------
    def checked(self, rows: int, seconds: float, n_texts: int, n_tokens: int) -> None:
        """Note a step: rows computed, seconds without the making of drafts, texts, tokens they gained."""
        costs = self.rows
        self._observe(rows, seconds)
        seconds /= costs.pace
        gained = 0.0
        if rows == n_texts:
            self.passed(1)
        else:
            self._waited = 0
            usual = costs.seconds[rows]  # what a single step took is the machine's doing as much as the draft's
            took = usual if costs.n_measured(rows) > _SURE else min(seconds, _UNUSUAL * usual)
            gained = n_tokens / n_texts - took / costs.seconds[n_texts]
            self._earn(gained)
        if self._trying:  # one that found nothing was a failure, too
            self._waited, self._trying = 0, False
            self._tried(succeeded=gained > 0)

    def _tried(self, *, succeeded: bool) -> None:
        self._patience = 1.0 if succeeded else min(2 * self._patience, _MOST_PATIENCE)

    def rested(self, n_texts: int, seconds: float) -> None:
        """Note the seconds of a step at rest; `passed` counts it."""
        self._observe(n_texts, seconds)

    def passed(self, n: int) -> None:
        """Note steps without drafts."""
        self._waited += n
        self._earn(n * SHARE)

    def _observe(self, rows: int, seconds: float) -> None:
        costs = self.rows
        costs.observe(rows, seconds)
        self._n_steps += 1
        if costs.n_measured(rows) <= 3 or self._n_steps >= self._refresh_at:
            if self._n_steps >= self._refresh_at:
                self._refresh_at = self._n_steps + self._next_refresh
                self._next_refresh = min(2 * self._next_refresh, _SELDOM)
            self._refresh()

    def seconds(self, rows: int) -> float:
        """Return the seconds that a step of so many rows takes at present."""
        return self.rows.seconds[rows] * self.rows.pace

    def measured_after(self, n_texts: int) -> int:
        """Return after how many steps without drafts one is to be measured."""
        return 1 if self.rows.n_measured(n_texts) < _WELL_KNOWN else _SAMPLED

    def _refresh(self) -> None:
        costs = self.rows
        costs.refresh()
        self._choice = [low if costs.n_measured(k) < _SURE else mean
                        for k, (mean, low) in enumerate(zip(costs.seconds, costs.low, strict=True))]  # fmt: skip
        self._renew()

    def _renew(self) -> None:
        self._n_news = 0
        self._ladders.clear()
        self._outlooks.clear()

    def _earn(self, steps: float) -> None:
        self.account = min(self.account + steps, _MOST)

    def _spend(self, seconds: float, n_texts: int) -> None:
        """Note seconds, at the usual pace, that a step took beyond its computation."""
        if (plain := self.rows.seconds[n_texts]) > 0:
            self._earn(-min(seconds / plain, _UNUSUAL))

    def looked(self, seconds: float, n_texts: int, n_steps: int = 1) -> int:
        """Note the processor time that looking for drafts and deciding took in each of `n_steps` steps.

        Return the number of steps to come that should not look: looking is paid from what other steps gained.
        """
        if (plain := self.rows.seconds[n_texts]) <= 0:
            return 0
        steps = min(seconds / plain, 1.0)
        if n_steps == 1:
            steps = min(steps, _UNUSUAL * self._looking or 1.0)
            self._looking += 0.2 * (steps - self._looking) if self._looking else steps
        self._earn(-n_steps * steps)
        if self._looking > SHARE and self.account < self._reserve:
            # Rests gain more than the looks between them cost: else the account would never recover.
            most = max(_LOOK_REST, math.ceil(_RECOVERS * self._looking / SHARE))
            return min(math.ceil((self._reserve - self.account) / SHARE), most, _REST)
        return 0

    def drafted(self, kind: str, n: int, seconds: float, n_texts: int) -> None:
        """Note the seconds that making drafts of up to n tokens took."""
        seconds /= self.rows.pace
        known = self._making.get(kind)
        if known is None:  # the first one includes what is done once
            self._making[kind] = MakingCosts()
            self._spend(seconds, n_texts)
            return
        usual = known(n) if known else seconds
        known.observe(n, seconds)
        self._spend(min(seconds, _UNUSUAL * usual), n_texts)

    def repaired(self, seconds: float, n_texts: int) -> None:
        """Note the seconds that it took to compute again what a wrong draft had overwritten."""
        seconds /= self.rows.pace
        self._repair = seconds if self._repair < 0 else self._repair + 0.2 * (seconds - self._repair)
        self._spend(seconds, n_texts)

    def judged(self, text: int, kind: str, n_asked: int, n_found: int, n_right: int) -> None:
        """Note how much of a draft was found, and right, or would have been: texts show it without a check."""
        self.acceptance.observe(text, kind, n_asked, n_found, n_right)
        if text in self._compared:
            self._compared.remove(text)
            self._tried(
                succeeded=1 + n_right > self.rows.seconds[min(1 + n_found, self.most_rows)] / self.rows.seconds[1]
            )
        self._n_judged += 1
        self._n_known += 1
        self._n_news += 1 if n_right else _WRONG
        if self._n_news >= _KEPT or self._n_judged <= _EARLY:
            self._renew()

    def forget(self, text: int) -> None:
        """Drop what is known of a finished text; what it saved does not pay for the next one."""
        self.acceptance.forget(text)
        self._compared.discard(text)
        self.account = min(self.account, _CARRIED)
        self._rest = min(self._rest, _NEXT_REST)
        self._n_judged = 0
        self._renew()

    # --- decisions --------------------------------------------------------------------------------------------------
    def decide(self, options: Sequence[Option], n_texts: int) -> Decision:
        """Choose the lengths of the drafts of a step in which `n_texts` texts, those of `options` among them, go on."""
        none = (0,) * len(options)
        self._trying = False
        if not options:
            return Decision(none, NO_DRAFT)
        if self.rows.n_measured(n_texts) < 2:
            return Decision(none, MEASURES)
        if self._n_known < _COMPARED and not any(o.costs for o in options):
            return Decision(none, COMPARES)
        found = self._outlook(options, n_texts, self.account > _RICH)
        if found is None:
            return Decision(none, NO_DRAFT)
        account = self.account
        if found.paying:
            again = min(_AGAIN, _OFTEN * self.rows.n_measured(n_texts))
            if found.rate < 1.5 * found.base and self.rows.age(n_texts) > again:
                return Decision(none, MEASURES, found.rate, found.base)
            for decision, worst, risk in found.paying:
                if risk <= account + _RISK and worst <= account + _OVERDRAFT:
                    self._rest = _FIRST_REST
                    return decision
            missing = min(max(risk - _RISK, worst - _OVERDRAFT) - account for _, worst, risk in found.paying)
            rest = min(max(math.ceil(missing / SHARE), 1), _REST)
            return Decision(none, TOO_DEAR, found.rate, found.base, rest)
        wait = self._patience * found.price / (SHARE + max(account - _START, 0) / _EXCESS)
        if self._waited >= wait and found.price <= account and found.promise > 0:
            self._reserve = _RESERVE
            if found.compares:
                self._waited = 0
                self._compared.update(o.text for o, n in zip(options, found.tried.lengths, strict=True) if n)
                return Decision(none, TRY, found.rate, found.base, compared=found.tried.lengths)
            self._trying = True
            return Decision(found.tried.lengths, TRY, found.rate, found.base)
        if found.promise > 0:  # looking for drafts must leave what the next try costs
            self._reserve = max(_RESERVE, min(found.price, _START))
        least = max(wait - self._waited, (found.price - account) / SHARE) if found.promise > 0 else _REST
        return Decision(none, DOES_NOT_PAY, found.rate, found.base, self._rest_for(int(least), options))

    def value(self, option: Option, n_texts: int) -> float:
        """Return the tokens per second if this draft were the only one of a step."""
        return max((rung.rate for rung in self._rungs((option,), n_texts, False)), default=0.0)

    def _rest_for(self, wanted: int, options: Sequence[Option]) -> int:
        """Return for how many steps a decision against drafts stands; the next one from a text may be better."""
        if not any(o.costs for o in options):
            return max(0, min(_NEXT_REST, wanted))
        rest = max(1, min(self._rest, wanted))
        self._rest = min(2 * self._rest, _REST)
        return rest

    def _outlook(self, options: Sequence[Option], n_texts: int, hopeful: bool) -> _Outlook | None:
        """Return what is known of these drafts; None if none of them can be as long as it has to be."""
        key = n_texts, hopeful, tuple(options)
        found = self._outlooks.get(key)
        if found is None:
            rungs = self._rungs(options, n_texts, hopeful)
            if not rungs:
                return None
            found = self._outlooks[key] = _Outlook(rungs, n_texts, n_texts / self.rows.seconds[n_texts])
        return found

    def _rungs(self, options: Sequence[Option], n_texts: int, hopeful: bool) -> Sequence[_Rung]:
        """Return what 1, 2, ... further rows promise."""
        if not self._choice or not self.rows.seconds[n_texts]:
            return ()
        if len(options) > 1:
            return self._climb(options, n_texts, hopeful)
        o = options[0]
        key = n_texts, hopeful, o.kind, o.text, o.n_least
        ladder = self._ladders.get(key)
        if ladder is None:
            ladder = self._ladders[key] = self._climb_one(replace(o, n_most=self.most_rows - n_texts), n_texts, hopeful)
        return ladder[: max(o.n_most - o.n_least + 1, 0)]

    def _climb_one(self, o: Option, n_texts: int, hopeful: bool) -> list[_Rung]:
        """Return what drafts of one text promise, from the fewest tokens that are worth it."""
        chain = self.acceptance.chain(o.text, o.kind, o.n_most, hopeful=hopeful)
        choice, high, plain = self._choice, self.rows.high, self.rows.seconds[n_texts]
        repair = self._repair if self._repair >= 0 else _REPAIR * plain
        first, each, unknown = self._making_of(o.kind, plain) if o.costs else (0.0, 0.0, 0.0)
        tokens, rows, made = float(n_texts), float(n_texts), 1.0
        wrong = 1 - chain.right[0] if chain.right else 1.0
        rungs: list[_Rung] = []
        for n, (right, found) in enumerate(zip(chain.right, chain.found, strict=True), 1):
            tokens += right
            rows += found
            making = first + each * made
            made += found
            if n >= o.n_least:
                seconds = between(choice, rows) + making + (1 - right) * repair
                most = first + (each + unknown) * n
                worst = (high[n_texts + n] + most + repair) / plain - 1
                rungs.append(_Rung(tokens / seconds, (n,), worst, worst * wrong, most / plain))
        return rungs

    def _climb(self, options: Sequence[Option], n_texts: int, hopeful: bool) -> list[_Rung]:
        """Return what drafts of several texts promise; rows go where they are most probably right."""
        chains = [self.acceptance.chain(o.text, o.kind, o.n_most, hopeful=hopeful) for o in options]
        costs = {o.kind: self._making_of(o.kind, self.rows.seconds[n_texts]) for o in options if o.costs}
        plain = self.rows.seconds[n_texts]
        repair = self._repair if self._repair >= 0 else _REPAIR * plain
        lengths = [0] * len(options)
        tokens, rows = float(n_texts), float(n_texts)
        rungs: list[_Rung] = []
        for n_rows in range(n_texts + 1, self.most_rows + 1):
            at = max((i for i, o in enumerate(options) if lengths[i] < o.n_most),
                     key=lambda i: chains[i].right[lengths[i]], default=-1)  # fmt: skip
            if at < 0:
                break
            tokens += chains[at].right[lengths[at]]
            rows += chains[at].found[lengths[at]]
            lengths[at] += 1
            used = [(o, c, n) for o, c, n in zip(options, chains, lengths, strict=True) if n]
            if any(n < o.n_least for o, _, n in used):
                continue
            making = most = 0.0  # texts of a kind are drafted together
            for kind, (first, each, unknown) in costs.items():
                mine = [(1 + sum(c.found[: n - 1]), n) for o, c, n in used if o.kind == kind]
                if mine:
                    making += first + each * max(made for made, _ in mine)
                    most += first + (each + unknown) * max(n for _, n in mine)
            wrong = 1 - min(c.right[n - 1] for _, c, n in used)
            worst = (self.rows.high[n_rows] + most + repair) / plain - 1
            risk = worst * (1 - min(c.right[0] for _, c, _ in used))
            rate = tokens / (between(self._choice, rows) + making + wrong * repair)
            rungs.append(_Rung(rate, tuple(lengths), worst, risk, most / plain))
        return rungs

    def _making_of(self, kind: str, plain: float) -> tuple[float, float, float]:
        """Return the seconds that making a draft takes: for each draft, for each token, and perhaps more for these."""
        known = self._making.get(kind)
        return (known.first, known.each, 0.0) if known else (0.0, _UNKNOWN / 2 * plain, _UNKNOWN / 2 * plain)
