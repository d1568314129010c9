"""The one interface for drafts, and its implementations: from texts, by a draft model, by the model's own heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.drafting import ngrams
from ikcli.drafting.draft_model import DraftModel
from ikcli.drafting.ngram_cache import Counts, NgramCache, merge, read_counts, write_counts
from ikcli.engine.run.session import Session
from ikcli.settings.drafts import HEAD_TYPES
from ikcli.settings.records import SpecStage
from ikcli.settings.sampling import SamplingConfig

Tokens = npt.NDArray[np.int32]
_SIZE_N, _SIZE_M, _MIN_HITS = 12, 48, 1
_SUFFIX_LEAST, _SUFFIX_MOST = 5, 64


@dataclass(slots=True)
class Wanted:
    """A text to continue by at most n_max tokens, each at least as probable as p_min.

    `seq`: the sequence of the session. `owner` differs where the sequence holds a new text, of which `history` are the
    tokens of prompt and output. `text`, empty for drafters that cost nothing, are those that a model sees: in the
    cache, and the last one. Drafters append to `found`, models also to `probabilities`.
    """

    seq: int
    owner: object
    history: Sequence[int]
    text: Tokens
    n_max: int
    p_min: float
    found: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)


class Drafter(Protocol):
    """Drafts for all texts of a session.

    `costs`: a longer draft takes more time, so lengths are chosen before. `sees_pictures`: it drafts for texts with
    images too.
    """

    costs: bool
    sees_pictures: bool

    def prepare(self, wanted: Sequence[Wanted]) -> Sequence[Wanted]:
        """Compute what the drafts continue; return the texts that can get one now."""

    def draft(self, wanted: Sequence[Wanted]) -> None:
        """Fill `found` of every text that it has a draft for."""

    def finished(self, seq: int, owner: object) -> None:
        """Learn from a finished text, and forget it."""

    def close(self) -> None:
        """Write what was learned, and release memory."""


class TextDrafter:
    """Drafts from earlier text; every text has a guesser of its own."""

    costs = False
    sees_pictures = True

    def __init__(self, make: Callable[[], ngrams.Drafter]) -> None:
        self._make = make
        self._guessers: dict[int, tuple[object, ngrams.Drafter]] = {}

    def guesser(self, seq: int, owner: object) -> ngrams.Drafter:
        """Return the guesser of a text, a new one for a new text."""
        known = self._guessers.get(seq)
        if known is None or known[0] is not owner:
            known = self._guessers[seq] = owner, self._make()
        return known[1]

    def prepare(self, wanted: Sequence[Wanted]) -> Sequence[Wanted]:
        return wanted

    def draft(self, wanted: Sequence[Wanted]) -> None:
        for w in wanted:
            w.found += _texts_only(self.guesser(w.seq, w.owner).draft(w.history, w.n_max)[: w.n_max])

    def finished(self, seq: int, owner: object) -> None:
        known, guesser = self._guessers.pop(seq, (None, None))
        if guesser is not None and known is owner:
            self.learn(guesser)

    def learn(self, guesser: ngrams.Drafter) -> None:
        """Learn from the guesser of a finished text."""

    def close(self) -> None:
        """Nothing to release."""


class CountsDrafter(TextDrafter):
    """ngram-cache: counts of the text, and of the files `-lcs` and `-lcd`; the latter learns from every text."""

    def __init__(self, sampling: SamplingConfig) -> None:
        super().__init__(lambda: NgramCache(self._dynamic, self._static))
        static, self._path = sampling.lookup_cache_static, sampling.lookup_cache_dynamic
        self._static: Counts = read_counts(static) if static else {}
        self._dynamic: Counts = read_counts(self._path) if self._path and self._path.exists() else {}

    def learn(self, guesser: ngrams.Drafter) -> None:
        if self._path is not None and isinstance(guesser, NgramCache):
            merge(self._dynamic, guesser.counts)

    def close(self) -> None:
        if self._path is not None and self._dynamic:
            write_counts(self._dynamic, self._path)


class ModelDrafter:
    """Drafts with a draft model."""

    costs = True
    sees_pictures = False

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def prepare(self, wanted: Sequence[Wanted]) -> Sequence[Wanted]:
        return [w for w in wanted if self._model.catch_up(w)]

    def draft(self, wanted: Sequence[Wanted]) -> None:
        self._model.draft(wanted)

    def finished(self, seq: int, owner: object) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        self._model.close()


class HeadsDrafter:
    """Drafts with the heads of the session (MTP)."""

    costs = True
    sees_pictures = False

    def __init__(self, session: Session) -> None:
        assert session.heads is not None, "`uses_heads` decides"
        self._heads = session.heads

    def prepare(self, wanted: Sequence[Wanted]) -> Sequence[Wanted]:
        return wanted

    def draft(self, wanted: Sequence[Wanted]) -> None:
        self._heads.draft(wanted)

    def finished(self, seq: int, owner: object) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """The session closes its heads."""


def _texts_only(draft: list[int]) -> list[int]:
    """Return a draft up to the first position of an image, which drafts from the prompt can reach."""
    return next((draft[:i] for i, token in enumerate(draft) if token < 0), draft)


def open_drafter(stage: SpecStage, session: Session) -> Drafter:
    """Return the drafter of a stage; raise UsageError or FormatError if its files do not fit."""
    size_n, size_m = stage.size_n or _SIZE_N, stage.size_m or _SIZE_M
    hits = max(_MIN_HITS if stage.min_hits is None else stage.min_hits, 1)
    if stage.type == "draft":
        return ModelDrafter(DraftModel.open(session.config, session))
    if stage.type in HEAD_TYPES:
        return HeadsDrafter(session)
    if stage.type == "ngram-cache":
        return CountsDrafter(session.config.sampling)
    if stage.type == "suffix":
        return TextDrafter(lambda: ngrams.Suffix(stage.size_n or _SUFFIX_LEAST, stage.size_m or _SUFFIX_MOST))
    if stage.type == "ngram-mod":
        pool = ngrams.Pool(size_n)
        return TextDrafter(lambda: ngrams.NgramPool(pool))
    if stage.type == "ngram-map-k4v":
        return TextDrafter(lambda: ngrams.NgramMapValues(size_n, size_m, hits))
    return TextDrafter(lambda: ngrams.NgramMap(size_n, size_m, hits))
