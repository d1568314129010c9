"""Speculative decoding: draft the next tokens, and let the model check several at a time.

A drafted token is kept only if the sampler also chooses it from the model's own logits, so the text is the same with
and without drafts. A micro-batch is kept so small that its results are batch-invariant (`Session.n_exact` rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ikcli.engine.run.mtp import Draft
from ikcli.engine.run.session import Session
from ikcli.errors import UsageError
from ikcli.server.slots import ngrams
from ikcli.server.slots.draft_model import DraftContinuation, DraftModel
from ikcli.server.slots.log import Logger
from ikcli.server.slots.ngram_cache import Counts, NgramCache, merge, read_counts, write_counts
from ikcli.server.slots.slot import Slot
from ikcli.settings.records import SpecSetting, SpecStage
from ikcli.settings.server import ServerConfig

T = TypeVar("T", int, float)
_SIZE_N, _SIZE_M, _MIN_HITS = 12, 48, 1
_SUFFIX_LEAST, _SUFFIX_MOST = 5, 64


def stages(session: Session) -> tuple[SpecStage, ...]:
    """Return the stages that the options ask for; `-md`, `-lcs` and `-lcd` imply their type."""
    config, sampling = session.config.server, session.config.sampling
    given = [_with_settings(s, config.spec_set) for s in config.spec_type if s.type != "none"]
    if config.spec_type and not given:
        return ()
    types = {s.type for s in given}
    if config.model_draft and "draft" not in types:
        given.append(SpecStage("draft"))
    if (sampling.lookup_cache_static or sampling.lookup_cache_dynamic) and "ngram-cache" not in types:
        given.append(SpecStage("ngram-cache"))
    if "draft" in types and not config.model_draft:
        raise UsageError("--spec-type draft needs a draft model; name one with -md FILE")
    return tuple(given)


def _with_settings(stage: SpecStage, settings: Sequence[SpecSetting]) -> SpecStage:
    """Fill in the `--spec-set` values of the stage's type where the stage has none."""
    for s in settings:
        if (stage.type == s.type or stage.type.startswith(f"{s.type}-")) and getattr(stage, s.field) is None:
            stage = replace(stage, **{s.field: s.value})  # type: ignore[arg-type]
    return stage


@dataclass(slots=True)
class _ByHeads:
    """A slot whose draft the model's heads compute, its fewest tokens, and the stage that asks for it."""

    slot: Slot
    wanted: Draft
    n_min: int
    stage: int


class Speculator:
    """Drafts tokens for the slots of one engine."""

    def __init__(self, session: Session, log: Logger) -> None:
        self._stages = stages(session)
        self._config: ServerConfig = session.config.server
        self._n_exact = session.n_exact
        self._heads = session.heads
        sampling = session.config.sampling
        self._dynamic_path = sampling.lookup_cache_dynamic
        static, dynamic = sampling.lookup_cache_static, self._dynamic_path
        self._static: Counts = read_counts(static) if static else {}
        self._dynamic: Counts = read_counts(dynamic) if dynamic and dynamic.exists() else {}
        self._pools: dict[int, ngrams.Pool] = {}
        self._drafters: dict[int, tuple[object, list[ngrams.Drafter | None]]] = {}  # slot -> its drafters
        has_model = any(s.type == "draft" for s in self._stages)
        self._model = DraftModel.open(session.config, session) if has_model else None
        if self._stages:
            log("INFO", "init", "speculative decoding", {"types": ",".join(s.type for s in self._stages)})

    def __bool__(self) -> bool:
        return bool(self._stages)

    def propose(self, slots: Sequence[Slot]) -> None:
        """Set the drafts of generating slots: at most `n_exact` rows together with the tokens they continue."""
        free = self._n_exact - len(slots)
        by_heads: list[_ByHeads] = []  # drafts of all slots, which are computed together
        for left, slot in zip(range(len(slots), 0, -1), slots, strict=True):
            slot.draft = ()
            if free > 0:
                free -= self._propose(slot, 0, -(-free // left), by_heads)
        if by_heads:
            assert self._heads is not None
            self._heads.draft([x.wanted for x in by_heads])
            for x in by_heads:
                x.slot.draft = x.wanted.found if len(x.wanted.found) >= x.n_min else ()
                if not x.slot.draft:
                    self._propose(x.slot, x.stage + 1, x.wanted.n_max, [])

    def _propose(self, slot: Slot, first: int, most: int, by_heads: list[_ByHeads]) -> int:
        """Set the draft of the first stage that has one, or add it to `by_heads`; return the tokens it may have."""
        for i, stage in enumerate(self._stages[first:], first):
            n_min, n_max, p_min = self._limits(slot, stage, most)
            if n_max <= 0:
                continue
            if stage.type == "mtp":
                by_heads.append(_ByHeads(slot, Draft(slot.id, slot.text_tokens(), n_max, p_min, [], []), n_min, i))
                return n_max
            draft = _texts_only(self._draft(slot, i, stage, n_max, p_min))
            if draft and len(draft) >= n_min:
                slot.draft = draft
                return len(draft)
        return 0

    def _limits(self, slot: Slot, stage: SpecStage, most: int) -> tuple[int, int, float]:
        """Return the fewest and most tokens of a draft, and their least probability."""
        g = slot.generation
        assert g is not None
        asked = g.request.speculation
        n_max = _first(asked.n_max, stage.n_max, self._config.draft_max)
        n_min = _first(asked.n_min, stage.n_min, self._config.draft_min)
        room = slot.n_ctx - slot.n_past - 1
        if g.n_remain >= 0:
            room = min(room, g.n_remain - 1)
        n_max = min(n_max, room, most)
        return min(n_min, n_max), n_max, _first(asked.p_min, stage.p_min, self._config.draft_p_min)

    def _draft(self, slot: Slot, index: int, stage: SpecStage, n_max: int, p_min: float) -> list[int]:
        g = slot.generation
        assert g is not None
        if stage.type == "draft":  # the draft model sees no images
            return [] if g.request.pictures else self._by_model(slot, n_max, p_min)
        drafter = self._drafter(slot, index)
        return drafter.draft(g.history, n_max)[:n_max] if drafter else []

    def _by_model(self, slot: Slot, n_max: int, p_min: float) -> list[int]:
        assert self._model is not None
        wanted = DraftContinuation(slot.id, slot.text_tokens(), n_max, p_min, [])
        self._model.draft([wanted])
        return wanted.found

    def _drafter(self, slot: Slot, index: int) -> ngrams.Drafter | None:
        """Return a new drafter of a stage; every generation gets its own."""
        owner, drafters = self._drafters.get(slot.id, (None, []))
        if owner is not slot.generation:
            drafters = [None if s.type in ("draft", "mtp") else self._make(s) for s in self._stages]
            self._drafters[slot.id] = slot.generation, drafters
        return drafters[index]

    def _make(self, stage: SpecStage) -> ngrams.Drafter:
        size_n, size_m = stage.size_n or _SIZE_N, stage.size_m or _SIZE_M
        hits = max(_first(stage.min_hits, _MIN_HITS), 1)
        if stage.type == "suffix":
            return ngrams.Suffix(stage.size_n or _SUFFIX_LEAST, stage.size_m or _SUFFIX_MOST)
        if stage.type == "ngram-mod":
            return ngrams.NgramPool(self._pools.setdefault(size_n, ngrams.Pool(size_n)))
        if stage.type == "ngram-map-k4v":
            return ngrams.NgramMapValues(size_n, size_m, hits)
        if stage.type == "ngram-cache":
            return NgramCache(self._dynamic, self._static)
        return ngrams.NgramMap(size_n, size_m, hits)

    def finished(self, slot: Slot) -> None:
        """Learn from a finished generation (`-lcd`)."""
        owner, drafters = self._drafters.pop(slot.id, (None, []))
        if self._dynamic_path is None or owner is not slot.generation:
            return
        for drafter in drafters:
            if isinstance(drafter, NgramCache):
                merge(self._dynamic, drafter.counts)

    def close(self) -> None:
        """Write what was learned, and release the draft model."""
        if self._model is not None:
            self._model.close()
        if self._dynamic_path is not None and self._dynamic:
            write_counts(self._dynamic, self._dynamic_path)


def _texts_only(draft: list[int]) -> list[int]:
    """Return a draft up to the first position of an image, which drafts from the prompt can reach."""
    return next((draft[:i] for i, token in enumerate(draft) if token < 0), draft)


def _first(*values: T | None) -> T:
    """Return the first value that is not None."""
    return next(v for v in values if v is not None)
