"""Which drafters the options of speculative decoding ask for, in which order, with which settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ikcli.errors import UsageError
from ikcli.settings.records import SpecSetting, SpecStage
from ikcli.settings.run import RunConfig

HEAD_TYPES = ("mtp", "eagle3", "dflash", "dspark")
"""Types whose drafts are made from the states of the model."""


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
    n_max = config.server.draft_max
    return "+".join(f"{s.type}:{min(n_max if s.n_max is None else s.n_max, most)}" for s in stages(config))
