"""Speculative decoding: draft the next tokens, and let the model check several at a time.

A drafted token is kept only if the sampler also chooses it from the model's own logits, so the text is the same with
and without drafts. A micro-batch is kept so small that its results are batch-invariant (`Session.n_exact` rows). How
many tokens a step drafts is what options and requests allow; with `--spec-autotune`, `drafting.policy` decides it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ikcli.drafting.drafters import Drafter, Wanted, open_drafter, stages
from ikcli.drafting.policy import Decision, Option, Policy
from ikcli.engine.run.session import Session
from ikcli.server.slots.generation import Generation
from ikcli.server.slots.log import Logger
from ikcli.server.slots.slot import Slot
from ikcli.settings.records import SpecStage
from ikcli.settings.server import ServerConfig

T = TypeVar("T", int, float)
_NO_TOKENS = np.zeros(0, np.int32)
_WAITS = Decision((), "waits: drafts did not pay")


@dataclass(frozen=True, slots=True)
class _Made:
    """A draft: its kind, and how many tokens were asked for and found."""

    kind: str
    n_asked: int
    n_found: int


class Speculator:
    """Drafts tokens for the slots of one engine."""

    def __init__(self, session: Session, log: Logger) -> None:
        self._stages = stages(session)
        self._config: ServerConfig = session.config.server
        self._n_exact = session.n_exact
        self._log = log
        self._drafters: list[Drafter] = [open_drafter(s, session) for s in self._stages]
        self._policy = _policy_of(session) if self._config.spec_autotune else None
        self._made: dict[int, _Made] = {}  # slot -> its draft
        self._seen: dict[tuple[int, int], Generation] = {}  # stage, slot -> the text that its model has computed
        self.decisions: Counter[str] = Counter()  # steps by what was decided
        self.last = ""  # decision
        if self._stages:
            log("INFO", "init", "speculative decoding", {"types": ",".join(s.type for s in self._stages)})

    def __bool__(self) -> bool:
        return bool(self._stages)

    # --- drafts -----------------------------------------------------------------------------------------------------
    def propose(self, slots: Sequence[Slot]) -> None:
        """Set the drafts of generating slots: at most `n_exact` rows together with the tokens they continue."""
        for slot in slots:
            slot.draft = ()
        self._made.clear()
        policy = self._policy
        if policy is None:
            self._propose_fixed(slots)
        elif policy.resting or len(slots) >= self._n_exact:
            self._note(_WAITS, ())
        else:
            start = time.perf_counter()
            making = self._propose_chosen(slots, policy)
            policy.looked(time.perf_counter() - start - making, len(slots))

    def _propose_fixed(self, slots: Sequence[Slot]) -> None:
        """Draft as much as options and requests allow; every slot gets its share of the rows."""
        without = list(slots)
        for stage, drafter in zip(self._stages, self._drafters, strict=True):
            free = self._n_exact - len(slots) - sum(len(s.draft) for s in slots)
            found: list[tuple[Slot, Wanted]] = []
            for left, slot in zip(range(len(without), 0, -1), without, strict=True):
                wanted = self._wanted(slot, stage, drafter, -(-free // left))
                if wanted.n_max > 0:
                    if not drafter.costs:
                        drafter.draft([wanted])
                    free -= wanted.n_max if drafter.costs else len(wanted.found)
                    found.append((slot, wanted))
            if drafter.costs and found:  # those of all slots are computed together
                for slot, wanted in found:
                    wanted.text = slot.text_tokens()
                drafter.draft(drafter.prepare([w for _, w in found]))
            for slot, wanted in found:
                self._use(slot, stage, wanted, wanted.n_max)
            without = [s for s in without if not s.draft]
        drafts = [Option(s.id, self._made[s.id].kind, len(s.draft)) for s in slots if s.draft]
        self._note(Decision(tuple(o.n_most for o in drafts), "as long as allowed" if drafts else "no draft"), drafts)

    def _propose_chosen(self, slots: Sequence[Slot], policy: Policy) -> float:
        """Draft as much as pays; return the seconds that models took, which the policy knows.

        Drafts that cost nothing are made first, the others when their length is chosen.
        """
        options: list[Option] = []
        found: list[tuple[Slot, int, Wanted]] = []
        for slot in slots:
            best: tuple[float, Option, int, Wanted] | None = None
            for i, (stage, drafter) in enumerate(zip(self._stages, self._drafters, strict=True)):
                wanted = self._wanted(slot, stage, drafter, self._n_exact - len(slots))
                if wanted.n_max <= 0:
                    continue
                if not drafter.costs:
                    drafter.draft([wanted])
                n = wanted.n_max if drafter.costs else len(wanted.found)
                least = max(self._least(slot, stage, wanted.n_max), 1)
                if n < least:
                    continue
                option = Option(slot.id, stage.type, n, drafter.costs, least)
                value = policy.value(option, len(slots)) if len(self._stages) > 1 else 1.0
                if best is None or value > best[0]:
                    best = value, option, i, wanted
            if best is not None:
                options.append(best[1])
                found.append((slot, best[2], best[3]))
        decision = policy.decide(options, len(slots))
        self._note(decision, options)
        making = 0.0
        for i, (stage, drafter) in enumerate(zip(self._stages, self._drafters, strict=True)):
            mine = [(s, w, n) for (s, at, w), n in zip(found, decision.lengths, strict=True) if at == i and n]
            if drafter.costs and mine:
                making += self._make(i, mine, policy, len(slots))
            for slot, wanted, n in mine:
                self._use(slot, stage, wanted, n)
        return making

    def _make(self, i: int, mine: Sequence[tuple[Slot, Wanted, int]], policy: Policy, n_texts: int) -> float:
        """Let a model draft for these slots; return the seconds that are not to be counted once more."""
        drafter, start = self._drafters[i], time.perf_counter()
        for slot, wanted, n in mine:
            wanted.n_max, wanted.text = n, slot.text_tokens()
        ready = drafter.prepare([w for _, w, _ in mine])
        prepared = time.perf_counter()
        drafter.draft(ready)
        end = time.perf_counter()
        if ready:
            policy.drafted(self._stages[i].type, max(min(len(w.found) + 1, w.n_max) for w in ready), end - prepared,
                           n_texts)  # fmt: skip
        known = True  # a prompt that the model computes is the price of having it, not of this draft
        for slot, _, _ in mine:
            assert slot.generation is not None
            known = known and self._seen.get((i, slot.id)) is slot.generation
        for wanted in ready:
            assert isinstance(wanted.owner, Generation)
            self._seen[i, wanted.seq] = wanted.owner
            if not wanted.found:
                policy.judged(wanted.seq, self._stages[i].type, wanted.n_max, 0, 0)
        return end - (prepared if known else start)

    def _wanted(self, slot: Slot, stage: SpecStage, drafter: Drafter, most: int) -> Wanted:
        g = slot.generation
        assert g is not None
        asked = g.request.speculation
        room = slot.n_ctx - slot.n_past - 1
        if g.n_remain >= 0:
            room = min(room, g.n_remain - 1)
        n_max = min(_first(asked.n_max, stage.n_max, self._config.draft_max), room, most)
        if g.request.pictures and not drafter.sees_pictures:
            n_max = 0
        p_min = _first(asked.p_min, stage.p_min, self._config.draft_p_min)
        return Wanted(slot.id, g, g.history, _NO_TOKENS, n_max, p_min)  # models alone need the text, a copy

    def _least(self, slot: Slot, stage: SpecStage, n_max: int) -> int:
        assert slot.generation is not None
        return min(_first(slot.generation.request.speculation.n_min, stage.n_min, self._config.draft_min), n_max)

    def _use(self, slot: Slot, stage: SpecStage, wanted: Wanted, n: int) -> bool:
        """Give the slot its draft; return False if it is empty or too short."""
        found = wanted.found[: max(n, 0)]
        if len(found) < max(self._least(slot, stage, wanted.n_max), 1):
            return False
        slot.draft = found
        self._made[slot.id] = _Made(stage.type, n, len(found))
        return True

    def _note(self, decision: Decision, options: Sequence[Option]) -> None:
        self.last = decision.reason
        self.decisions[decision.reason] += 1
        if self._config.spec_explain:
            drafts = ", ".join(f"slot {o.text}: {n} of {o.n_most} {o.kind}"
                               for o, n in zip(options, decision.lengths, strict=True))  # fmt: skip
            rates = f"; {decision.expected:.2f} tokens/s expected with drafts, {decision.plain:.2f} without"
            text = f"drafts: {drafts or 'none'}; {decision.reason}{rates if decision.plain else ''}"
            self._log("INFO", "speculation", text, {
                "lengths": list(decision.lengths), "reason": decision.reason,
                "expected": round(decision.expected, 3), "plain": round(decision.plain, 3),
            })  # fmt: skip

    # --- what became of them ----------------------------------------------------------------------------------------
    def checked(self, slots: int, rows: int, seconds: float, n_tokens: int) -> None:
        """Note a step of so many slots and rows, and the tokens that it gave."""
        if self._policy is not None:
            self._policy.checked(rows, seconds, slots, n_tokens)

    def judged(self, slot: Slot, n_right: int) -> None:
        """Note that the first `n_right` tokens of a slot's draft were right, and the next one was not."""
        if self._policy is not None and (made := self._made.get(slot.id)) is not None:
            self._policy.judged(slot.id, made.kind, made.n_asked, made.n_found, n_right)

    def repaired(self, seconds: float, n_tokens: int = 0) -> None:
        """Note the seconds that it took to compute again what a wrong draft had overwritten, and `n_tokens` more."""
        if self._policy is not None:
            self._policy.repaired(max(seconds - n_tokens * self._policy.rows.seconds[1], 0.0), 1)

    def finished(self, slot: Slot) -> None:
        """Learn from a finished generation (`-lcd`)."""
        for drafter in self._drafters:
            drafter.finished(slot.id, slot.generation)
        if self._policy is not None:
            self._policy.forget(slot.id)
            for i in range(len(self._stages)):
                self._seen.pop((i, slot.id), None)

    def close(self) -> None:
        """Write what was learned, and release the draft model."""
        for drafter in self._drafters:
            drafter.close()


def _policy_of(session: Session) -> Policy:
    hp = session.model.hp
    experts = (hp.n_expert, hp.n_expert_used) if hp.n_expert > hp.n_expert_used > 0 else None
    return Policy(session.n_exact, experts=experts, repairs=not session.sequences.kind.is_free)


def _first(*values: T | None) -> T:
    """Return the first value that is not None."""
    return next(v for v in values if v is not None)
