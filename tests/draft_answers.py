"""Answers of slots that draft with heads, of sequences that go on, are taken back and replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from engine_client import Call, request, serving
from stage_threads import Threads

from ikcli.engine.pipeline import supervisor
from ikcli.engine.run.mtp import Continuation, Heads
from ikcli.server.slots.engine import Engine
from ikcli.settings.fleet import BatchConfig

PROMPTS = [np.random.default_rng(i).integers(0, 96, 30 + 20 * i).tolist() for i in range(3)]


def answers(e: Engine) -> Iterator[list[int]]:
    """Two slots at once, a text that goes on, one that ends otherwise, and a slot that another text took."""
    calls = [Call(e, request(p, 40, id_slot=i)) for i, p in enumerate(PROMPTS[:2])]
    first = [[t.id for t in c.final.tokens] for c in calls]
    yield from first
    further = [
        (PROMPTS[0] + first[0] + PROMPTS[2][:5], 0), (PROMPTS[0] + PROMPTS[2][:9], 0), (PROMPTS[2], 0),
        (PROMPTS[0] + first[0][:20], 1), (PROMPTS[0] + first[0], 0),
    ]  # fmt: skip
    for prompt, slot in further:
        yield [t.id for t in Call(e, request(prompt, 24, id_slot=slot)).final.tokens]


def helped(texts: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every second draft begin with the right tokens, so that drafts are accepted and rejected."""
    right = {tuple(t[i : i + 3]): t[i + 3 : i + 6] for t in texts for i in range(len(t) - 5)}
    draft, n_calls = Heads.draft, [0]

    def drafted(self: Heads, wanted: Sequence[Continuation]) -> None:
        draft(self, wanted)
        n_calls[0] += 1
        for w in wanted:
            known = right.get(tuple(w.text[-3:].tolist()))
            if known is not None and n_calls[0] % 2:
                w.found[: len(known)] = known[: len(w.found)]

    monkeypatch.setattr(Heads, "draft", drafted)


def check_answers(
    spec: Mapping[str, Any], settings: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, *, windows: bool = False
) -> list[list[int]]:
    """Check that two slots answer with the drafts of `spec` as without; return the answers. `windows`: caches move."""
    with serving(2, **settings) as e:
        plain = list(answers(e))
    helped([*PROMPTS, *plain], monkeypatch)
    with serving(2, server=dict(spec), **settings) as e:
        assert not windows or e._worker.session.graph_config.n_window
        assert list(answers(e)) == plain
        metrics = e.metrics()
        assert metrics.draft_tokens_total > metrics.draft_tokens_accepted_total > 20
    return plain


def check_stages(
    spec: Mapping[str, Any], settings: Mapping[str, Any], plain: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the first two answers again, of a model in two stages."""
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)
    stages: dict[str, Any] = {"fleet": BatchConfig(stages=2), "n_threads": 2, "n_threads_batch": 2}
    with serving(2, server=dict(spec), **(settings | stages)) as e:
        first = [Call(e, request(p, 40, id_slot=i)) for i, p in enumerate(PROMPTS[:2])]
        assert [[t.id for t in c.final.tokens] for c in first] == list(plain[:2])
