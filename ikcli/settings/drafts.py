"""Which drafters the options of speculative decoding ask for, in which order, with which settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from ikcli.errors import UsageError
from ikcli.settings.records import SpecSetting, SpecStage
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

T = TypeVar("T", int, float)

HEAD_TYPES = ("mtp", "eagle3", "dflash", "dspark")
"""Types whose drafts are made from the states of the model."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most and fewest tokens of a draft, and the least probability of each."""

    n_max: int
    n_min: int
    p_min: float

    def least(self, n_max: int) -> int:
        """Return the fewest tokens of a draft where there is room for n_max."""
        return min(self.n_min, max(n_max, 1))


def limits(
    stage: SpecStage,
    server: ServerConfig,
    *,
    n_max: int | None = None,
    n_min: int | None = None,
    p_min: float | None = None,
) -> Limits:
    """Return the limits of a stage: those given here (by a request), else the stage's, else the server's."""
    return Limits(
        _first(n_max, stage.n_max, server.draft_max),
        max(_first(n_min, stage.n_min, server.draft_min), 1),
        _first(p_min, stage.p_min, server.draft_p_min),
    )


def _first(*values: T | None) -> T:
    """Return the first value that is not None."""
    return next(v for v in values if v is not None)


def stages(config: RunConfig) -> tuple[SpecStage, ...]:
    """Return the stages that the options ask for; `-md`, `-lcs` and `-lcd` imply their type."""
    server, sampling = config.server, config.sampling
    given = [with_settings(s, server.spec_set) for s in server.spec_type if s.type != "none"]
    if server.spec_type and not given:
        return ()
    types = {s.type for s in given}
    if server.model_draft and not types & {"draft", *HEAD_TYPES}:
        given.append(SpecStage("draft"))
    if (sampling.lookup_cache_static or sampling.lookup_cache_dynamic) and "ngram-cache" not in types:
        given.append(SpecStage("ngram-cache"))
    if "draft" in types and not server.model_draft:
        raise UsageError("--spec-type draft needs a draft model; name one with -md FILE")
    heads = [kind for kind in HEAD_TYPES if kind in types]
    if heads and heads[-1] != "mtp" and not server.model_draft:
        raise UsageError(f"--spec-type {heads[-1]} needs the file of the head; name it with -md FILE")
    if len(heads) > 1:
        raise UsageError(f"--spec-type {' and '.join(heads)} cannot be combined: a model drafts with one kind of heads")
    return tuple(given)


def kind_of_heads(config: RunConfig) -> str | None:
    """Return the first type whose drafts are made from the states of the model."""
    return next((s.type for s in config.server.spec_type if s.type in HEAD_TYPES), None)


def with_settings(stage: SpecStage, settings: Iterable[SpecSetting]) -> SpecStage:
    """Fill in the `--spec-set` values of the stage's type where the stage has none."""
    values = {s.field: s.value for s in settings if stage.type == s.type or stage.type.startswith(f"{s.type}-")}
    return replace(stage, **{k: v for k, v in values.items() if getattr(stage, k) is None})  # type: ignore[arg-type]


def label(config: RunConfig, most: int) -> str:
    """Name the drafters and the tokens of their drafts, at most `most`, as `mtp:3` or `ngram-simple:7+mtp:3`.

    Empty without drafters.
    """
    return "+".join(f"{s.type}:{min(limits(s, config.server).n_max, most)}" for s in stages(config))
