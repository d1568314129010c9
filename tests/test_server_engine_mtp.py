"""Slots that draft with the model's own heads answer as without, whatever becomes of their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import Call, request, serving
from factories import MemoryModel, add_heads, tiny_deepseek2
from gguf_files import write_model
from tiers import some
from tiny_architectures import tiny

from ikcli.engine.run.mtp import Continuation, Heads
from ikcli.errors import IkError
from ikcli.server.slots.engine import Engine
from ikcli.settings.values import parse_spec_type

MODELS = {
    "qwen35": lambda: add_heads(tiny("qwen35", context_length=2048)),
    "deepseek2": lambda: add_heads(tiny_deepseek2(context_length=2048)),
    "mimo2": lambda: add_heads(tiny("mimo2", context_length=2048), 2, dense=True),
}
PROMPTS = [np.random.default_rng(i).integers(0, 96, 30 + 20 * i).tolist() for i in range(3)]
SPEC = {"spec_type": parse_spec_type("mtp:p_min=0"), "spec_autotune": False}


def written(model: MemoryModel, folder: Path) -> Path:
    return write_model(model, folder / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})


@pytest.fixture(params=some(list(MODELS), ["qwen35"]))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return written(MODELS[request.param](), tmp_path)


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


def test_answers_are_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second draft begins with the right tokens, so that drafts are accepted and rejected."""
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "n_ubatch": 32}
    with serving(2, **settings) as e:
        plain = list(answers(e))
    texts = [*PROMPTS, *plain]
    right = {tuple(t[i : i + 3]): t[i + 3 : i + 6] for t in texts for i in range(len(t) - 5)}
    draft, n_calls = Heads.draft, [0]

    def helped(self: Heads, wanted: Sequence[Continuation]) -> None:
        draft(self, wanted)
        n_calls[0] += 1
        for w in wanted:
            known = right.get(tuple(w.text[-3:].tolist()))
            if known is not None and n_calls[0] % 2:
                w.found[: len(known)] = known[: len(w.found)]

    monkeypatch.setattr(Heads, "draft", helped)
    with serving(2, server=SPEC, **settings) as e:
        assert list(answers(e)) == plain
        metrics = e.metrics()
        assert metrics.draft_tokens_total > metrics.draft_tokens_accepted_total > 20


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    path = written(tiny("qwen35", context_length=2048), tmp_path)
    with (
        pytest.raises(AssertionError, match="no layers that predict further tokens"),
        serving(1, model=path, server=SPEC),
    ):
        raise IkError("not reached")
