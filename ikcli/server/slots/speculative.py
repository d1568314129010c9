"""Speculative decoding: draft the next tokens, and let the model check several at a time.

A drafted token is kept only if the sampler also chooses it from the model's own logits, so the text is the same with
and without drafts. A micro-batch is kept so small that its results are batch-invariant (`Session.n_exact` rows). How
many tokens a step drafts, `drafting.policy` decides; with `--no-spec-autotune`, as many as options and requests allow.

A step that drafts nothing must cost next to nothing, since a small model's step takes half a millisecond: most steps
ask one attribute (`rest`), others only whether the index of a text has a guess.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ikcli.drafting.drafters import Drafter, TextDrafter, Wanted, open_drafter
from ikcli.drafting.policy import NO_DRAFT, RESTS, SHARE, Decision, Option, Policy
from ikcli.engine.run.mtp import Heads
from ikcli.engine.run.session import Session
from ikcli.server.slots.generation import Generation
from ikcli.server.slots.log import Logger
from ikcli.server.slots.slot import Slot
from ikcli.settings.drafts import Limits, limits, stages
from ikcli.settings.records import SpecStage
from ikcli.settings.server import ServerConfig

_NO_TOKENS = np.zeros(0, np.int32)
FIXED = "as long as allowed"
_AWAKE = 3  # last steps of a rest, in which heads keep states for the next draft


@dataclass(frozen=True, slots=True)
class _Made:
    """A draft: its kind, and how many tokens were asked for and found."""

    kind: str
    n_asked: int
    n_found: int


@dataclass(frozen=True, slots=True)
class _Unused:
    """A draft that was not checked: the text goes on and shows what of it was right.

    `at`: tokens before it; `n_asked`: tokens that were asked for.
    """

    generation: Generation
    kind: str
    at: int
    tokens: Sequence[int]
    n_asked: int


class Speculator:
    """Drafts tokens for the slots of one engine.

    `rest`: steps that need no call of `propose`; below zero, none does. `measures`: `checked` is to be called.
    """

    def __init__(self, session: Session, log: Logger) -> None:
        self._stages = stages(session.config)
        self._config: ServerConfig = session.config.server
        self._n_exact = session.n_exact
        self._log = log
        self._drafters: list[Drafter] = [open_drafter(s, session) for s in self._stages]
        self._policy = _policy_of(session) if self._stages and self._config.spec_autotune else None
        self._texts = [d for d in self._drafters if isinstance(d, TextDrafter)]
        self._looks: dict[int, list[Callable[[Sequence[int]], bool]]] = {}  # slot -> `may` of every index of its text
        self.rest = 0 if self._stages else -1
        self.measures = self._looked = False
        self._models_rest = 0 if len(self._texts) < len(self._drafters) else -1  # steps that ask no model, as `rest`
        self._heads = session.heads
        self._waking = 0  # steps of a rest that are left when heads wake up
        self._passed = self._quiet = 0  # steps that the policy does not know of: at rest, and those that found nothing
        self._measured_after = 1  # of the latter
        self._explains = self._config.spec_explain
        self._made: dict[int, _Made] = {}  # slot -> its latest draft
        self._unused: dict[int, _Unused] = {}
        self._limits: dict[int, list[Limits]] = {}  # slot -> those of every stage
        self._seen: dict[tuple[int, int], Generation] = {}  # stage, slot -> the text that its model has computed
        self._decisions: Counter[str] = Counter()
        self._before: dict[int, Counter[str]] = {}  # slot -> decisions before its text began
        if self._stages:
            log("INFO", "init", "speculative decoding", {"types": ",".join(s.type for s in self._stages)})

    def __bool__(self) -> bool:
        return bool(self._stages)

    # --- drafts -----------------------------------------------------------------------------------------------------
    def propose(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Set the drafts of generating slots, at most `n_exact` rows with the tokens they continue; return who has one.

        Slots have no drafts before, and lose them after the step.
        """
        policy = self._policy
        if policy is None:
            self._propose_fixed(slots)
            return [s for s in slots if s.draft]
        if len(slots) >= self._n_exact:
            return ()
        if self._waking:
            self._wake(self._waking)
            return ()
        start = 0.0
        asks_models = not self._models_rest
        if self._models_rest:
            self._models_rest -= 1
            due = self._quiet + 1 >= self._measured_after
            if due:
                start = time.thread_time()
            if not self._may_draft(slots):
                self._quiet += 1
                if due:
                    self._report(policy, self._quiet - 1)
                    self._rest(policy.looked(time.thread_time() - start, len(slots), self._quiet))
                    self._decisions[NO_DRAFT] += self._quiet
                    self._quiet = 0
                    self._measured_after = policy.measured_after(len(slots))
                    self.measures = self._looked = True
                if self._explains:
                    self._explain(Decision((), NO_DRAFT), ())
                return ()
        start = start or time.thread_time()
        self._report(policy, self._quiet)
        self._decisions[NO_DRAFT] += self._quiet
        self._quiet = 0
        making, rest = self._propose_chosen(slots, policy, asks_models=asks_models)
        rest_of_look = policy.looked(time.thread_time() - start - making, len(slots))
        self.measures = self._looked = True
        drafted = [s for s in slots if s.draft]
        if not drafted:
            self._rest(max(rest, rest_of_look))
            if self.rest > 1 and self._heads is not None:
                self._sleep(policy, slots, self._heads)
        return drafted

    def _sleep(self, policy: Policy, slots: Sequence[Slot], heads: Heads) -> None:
        """Keep nothing for the heads during a rest, but in its last steps, if what they keep costs more than it may."""
        plain = policy.seconds(len(slots))
        if heads.n_steps and heads.seconds / heads.n_steps > SHARE * plain:
            heads.asleep.update(s.id for s in slots)
            self._waking = min(_AWAKE, self.rest - 1)
            self.rest -= self._waking

    def _wake(self, rest: int) -> None:
        """Let the heads keep states again, and rest for a few steps more, this one included."""
        assert self._heads is not None
        self._heads.asleep.clear()
        self.rest, self._waking = rest - 1, 0

    def _may_draft(self, slots: Sequence[Slot]) -> bool:
        """Return whether the index of a text has a guess."""
        for slot in slots:
            if (g := slot.generation) is not None:
                for may in self._looks[slot.id]:
                    if may(g.history):
                        return True
        return False

    def _report(self, policy: Policy, n_quiet: int) -> None:
        """Tell the policy of the steps without drafts since it was last told."""
        if self._passed or n_quiet:
            policy.passed(self._passed + n_quiet)
            self._passed = 0

    def _rest(self, n: int) -> None:
        """Let the next n steps not look for drafts."""
        self.rest = n
        if n:
            self._passed += n
            self._decisions[RESTS] += n

    def begins(self, slot: Slot) -> None:
        """Note that the slot begins to generate; a rest ends with it."""
        if self._stages:
            left = self.rest + self._waking
            if left:
                self._passed -= left
                self._decisions[RESTS] -= left
                self.rest = self._waking = 0
            if self._heads is not None:
                self._heads.asleep.clear()
            self._models_rest = min(self._models_rest, 0)
            assert slot.generation is not None
            self._limits[slot.id] = [self._limits_of(slot.generation, *x)
                                     for x in zip(self._stages, self._drafters, strict=True)]  # fmt: skip
            self._looks[slot.id] = [d.guesser(slot.id, slot.generation).may for d in self._texts]
            self._before[slot.id] = self._counts()

    def _propose_fixed(self, slots: Sequence[Slot]) -> None:
        """Draft as much as options and requests allow; every slot gets its share of the rows."""
        without = list(slots)
        for i, drafter in enumerate(self._drafters):
            free = self._n_exact - len(slots) - sum(len(s.draft) for s in slots)
            found: list[tuple[Slot, Wanted]] = []
            for left, slot in zip(range(len(without), 0, -1), without, strict=True):
                wanted = self._wanted(slot, i, -(-free // left))
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
                self._use(slot, i, wanted, wanted.n_max)
            without = [s for s in without if not s.draft]
        drafts = [Option(s.id, self._made[s.id].kind, len(s.draft)) for s in slots if s.draft]
        self._note(Decision(tuple(o.n_most for o in drafts), FIXED if drafts else NO_DRAFT), drafts)

    def _propose_chosen(self, slots: Sequence[Slot], policy: Policy, *, asks_models: bool) -> tuple[float, int]:
        """Draft as much as pays; return the processor time of models, which was noted already, and steps to rest.

        Drafts that cost nothing are made first, the others when their length is chosen.
        """
        options: list[Option] = []
        found: list[tuple[Slot, int, Wanted]] = []
        for slot in slots:
            self._compare(slot, policy)
            best: tuple[float, Option, int, Wanted] | None = None
            for i, (stage, drafter) in enumerate(zip(self._stages, self._drafters, strict=True)):
                if drafter.costs and not asks_models:
                    continue
                wanted = self._wanted(slot, i, self._n_exact - len(slots))
                if wanted.n_max <= 0:
                    continue
                if not drafter.costs:
                    drafter.draft([wanted])
                n = wanted.n_max if drafter.costs else len(wanted.found)
                least = self._limits[slot.id][i].least(wanted.n_max)
                if n < least:
                    continue
                option = Option(slot.id, stage.type, n, drafter.costs, least)
                if len(self._stages) == 1:
                    best = 0.0, option, i, wanted
                    break
                value = policy.value(option, len(slots))
                if best is None or value > best[0]:
                    best = value, option, i, wanted
            if best is not None:
                options.append(best[1])
                found.append((slot, best[2], best[3]))
        decision = policy.decide(options, len(slots))
        self._note(decision, options)
        rest, making = decision.rest, 0.0
        if rest and self._texts and all(o.costs for o in options):
            self._models_rest, rest = rest, 0
        for (slot, i, wanted), n in zip(found, decision.lengths, strict=True):
            if not n and not self._drafters[i].costs and slot.id not in self._unused:
                self._keep_unused(slot, i, wanted, len(wanted.found))
        lengths = decision.compared or decision.lengths
        if not any(lengths):
            return making, rest
        for i, drafter in enumerate(self._drafters):
            mine = [(s, w, n) for (s, at, w), n in zip(found, lengths, strict=True) if at == i and n]
            if drafter.costs and mine:
                making += self._make(i, mine, policy, len(slots))
            for slot, wanted, n in mine:
                if decision.compared:
                    self._keep_unused(slot, i, wanted, n)
                else:
                    self._use(slot, i, wanted, n)
        return making, rest

    def _keep_unused(self, slot: Slot, i: int, wanted: Wanted, n: int) -> None:
        """Keep a draft of up to n tokens, to be compared with the text."""
        g = slot.generation
        if g is not None and wanted.found:
            self._unused[slot.id] = _Unused(g, self._stages[i].type, len(g.history), tuple(wanted.found[:n]), n)

    def _compare(self, slot: Slot, policy: Policy, *, ends: bool = False) -> None:
        """Compare a draft that was not used with the text, once it is long enough or shows an error, or ends."""
        unused = self._unused.get(slot.id)
        if unused is None:
            return
        history, n = unused.generation.history, len(unused.tokens)
        n_known = min(len(history) - unused.at, n)
        right = 0
        while right < n_known and history[unused.at + right] == unused.tokens[right]:
            right += 1
        if n_known == n or right < n_known or ends:
            del self._unused[slot.id]
            if n_known > 0:
                whole = right < n_known or n_known == n  # an error is one however long the draft was
                n_asked, n = (unused.n_asked, n) if whole else (n_known, n_known)
                policy.judged(slot.id, unused.kind, n_asked, n, right)

    def _make(self, i: int, mine: Sequence[tuple[Slot, Wanted, int]], policy: Policy, n_texts: int) -> float:
        """Let a model draft for these slots; return the processor time that is not to be counted once more."""
        drafter, start = self._drafters[i], time.thread_time()
        for slot, wanted, n in mine:
            wanted.n_max, wanted.text = n, slot.text_tokens()
        ready = drafter.prepare([w for _, w, _ in mine])
        prepared, begun = time.thread_time(), time.perf_counter()
        drafter.draft(ready)
        seconds, end = time.perf_counter() - begun, time.thread_time()
        if ready:
            n_made = max(min(len(w.found) + 1, w.n_max) for w in ready)
            policy.drafted(self._stages[i].type, n_made, seconds, n_texts)
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

    def _limits_of(self, g: Generation, stage: SpecStage, drafter: Drafter) -> Limits:
        asked = g.request.speculation
        n_max = 0 if g.request.pictures and not drafter.sees_pictures else asked.n_max
        return limits(stage, self._config, n_max=n_max, n_min=asked.n_min, p_min=asked.p_min)

    def _wanted(self, slot: Slot, i: int, most: int) -> Wanted:
        """Return what stage i is asked for; a model needs the text as well, which is a copy."""
        g, limits = slot.generation, self._limits[slot.id][i]
        assert g is not None
        room = slot.n_ctx - slot.n_past - 1
        if 0 <= g.n_remain <= room:
            room = g.n_remain - 1
        return Wanted(slot.id, g, g.history, _NO_TOKENS, min(limits.n_max, room, most), limits.p_min)

    def _use(self, slot: Slot, i: int, wanted: Wanted, n: int) -> bool:
        """Give the slot its draft; return False if it is empty or too short."""
        found = wanted.found[: max(n, 0)]
        if len(found) < self._limits[slot.id][i].least(wanted.n_max):
            return False
        slot.draft = found
        self._made[slot.id] = _Made(self._stages[i].type, n, len(found))
        return True

    def _note(self, decision: Decision, options: Sequence[Option]) -> None:
        self._decisions[decision.reason] += 1
        if self._explains:
            self._explain(decision, options)

    def _explain(self, decision: Decision, options: Sequence[Option]) -> None:
        compared = ", compared only" if decision.compared else ""
        lengths = decision.compared or decision.lengths
        drafts = ", ".join(f"slot {o.text}: {n} of {o.n_most} {o.kind}{compared}"
                           for o, n in zip(options, lengths, strict=True))  # fmt: skip
        pace = self._policy.rows.pace if self._policy is not None else 1.0
        expected, plain = decision.expected / pace, decision.plain / pace
        rates = f"; {expected:.2f} tokens/s expected with drafts, {plain:.2f} without"
        stands = f"; stands for {decision.rest} further steps" if decision.rest else ""
        text = f"drafts: {drafts or 'none'}; {decision.reason}{rates if plain else ''}{stands}"
        self._log("INFO", "speculation", text, {
            "lengths": list(decision.lengths), "compared": list(decision.compared), "reason": decision.reason,
            "expected": round(expected, 3),
            "plain": round(plain, 3), "rest": decision.rest,
        })  # fmt: skip

    # --- what became of them ----------------------------------------------------------------------------------------
    def checked(self, slots: int, rows: int, seconds: float, n_tokens: int) -> None:
        """Note a step of so many slots and rows, and the tokens that it gave."""
        looked, self.measures, self._looked = self._looked, False, False
        if self._policy is None:
            return
        if looked:
            self._policy.checked(rows, seconds, slots, n_tokens)
        elif rows == slots:
            self._policy.rested(slots, seconds)

    def judged(self, slot: Slot, n_right: int) -> None:
        """Note that the first `n_right` tokens of a slot's draft were right, and the next one was not."""
        if self._policy is not None and (made := self._made.get(slot.id)) is not None:
            self._policy.judged(slot.id, made.kind, made.n_asked, made.n_found, n_right)

    def repaired(self, seconds: float, n_tokens: int = 0) -> None:
        """Note the seconds that it took to compute again what a wrong draft had overwritten, and `n_tokens` more."""
        if self._policy is not None:
            self._policy.repaired(max(seconds - n_tokens * self._policy.seconds(1), 0.0), 1)

    def finished(self, slot: Slot) -> None:
        """Learn from a finished generation (`-lcd`)."""
        g = slot.generation
        for texts in self._texts:
            if g is not None:  # steps at rest did not show it what they added
                texts.guesser(slot.id, g).may(g.history)
        for drafter in self._drafters:
            drafter.finished(slot.id, slot.generation)
        if self._policy is not None:
            if self._heads is not None:
                self._heads.asleep.discard(slot.id)
            self._compare(slot, self._policy, ends=True)
            self._policy.forget(slot.id)
            for i in range(len(self._stages)):
                self._seen.pop((i, slot.id), None)

    @property
    def decisions(self) -> Mapping[str, int]:
        """Return the number of steps by what was decided, and why."""
        return self._counts()

    def _counts(self) -> Counter[str]:
        counts = Counter(dict(self._decisions))  # a copy in one piece: other threads ask, too
        counts[NO_DRAFT] += self._quiet
        if self.rest + self._waking > 0:
            counts[RESTS] -= self.rest + self._waking  # they are still to come
        return +counts

    def summary(self, slot: Slot) -> dict[str, object]:
        """Return the fields of the log that tell of a finished generation's drafts.

        Decisions are those of all steps since it began, in which other slots may have been.
        """
        g = slot.generation
        assert g is not None
        n_steps = g.output.n_total - g.n_accepted  # the prompt's among them
        return {
            "n_drafts": g.n_drafts, "n_drafted": g.n_drafted, "n_accepted": g.n_accepted,
            "n_per_step": round(g.output.n_total / n_steps, 3) if n_steps else 0.0,
            "decisions": dict(self._counts() - self._before.get(slot.id, Counter())),
        }  # fmt: skip

    def close(self) -> None:
        """Write what was learned, and release the draft model."""
        for drafter in self._drafters:
            drafter.close()


def _policy_of(session: Session) -> Policy:
    hp = session.model.hp
    experts = (hp.n_expert, hp.n_expert_used) if hp.n_expert > hp.n_expert_used > 0 else None
    return Policy(session.n_exact, experts=experts, repairs=not session.sequences.kind.is_free)
