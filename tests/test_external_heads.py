"""Heads in files of other architectures: against NumPy, drafts that change no token, files that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_answers import PROMPTS, answers, helped
from engine_client import Call, request, serving
from external_heads import Seen, assistant, assistant_logits, written
from factories import MemoryModel, tiny_model
from stage_threads import Threads
from tiny_architectures import tiny

from ikcli.engine.pipeline import supervisor
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Draft
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.reader import open_gguf
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.records import SpecStage
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.values import parse_spec_type

TOKENS = np.random.default_rng(1).integers(0, 96, 40).astype(np.int32)
CPU: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "n_ctx": 256, "type_k": "f32",
                       "type_v": "f32"}  # fmt: skip


def opened(model: Path, head: Path, kind: str = "mtp", **changes: Any) -> Session:
    server = ServerConfig(spec_type=(SpecStage(kind),), model_draft=head)
    return Session.open(RunConfig(model=model, server=server, **(CPU | changes)), n_step=1)


@pytest.mark.parametrize("arch", ["gemma4_mtp", "gemma4-assistant"])
def test_assistant_against_numpy(arch: str, tmp_path: Path) -> None:
    """Its drafts, each from the state that the last one left, after prompts within and beyond the window."""
    model = tiny("gemma4")
    head = assistant(arch, model)
    files = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    seen, window = Seen(files[0], TOKENS), model.metadata["gemma4.attention.sliding_window"]
    with opened(*files) as session:
        assert session.heads is not None
        for n_past in (3, 30):
            session.clear()
            session.decode(Batch.single(TOKENS[:n_past]))
            wanted, state = [], seen.values["result_norm"][n_past - 1]
            token = int(TOKENS[n_past])
            for _ in range(4):
                logits, state = assistant_logits(head, model, seen, token, state, n_past, window)
                token = int(logits.argmax())
                wanted.append((token, float(1 / np.exp(logits - logits.max()).sum())))
            draft = Draft(0, TOKENS[: n_past + 1], 4, 0.0, [], [])
            session.heads.draft([draft])
            assert draft.found == [token for token, _ in wanted]
            assert np.allclose(draft.probabilities, [p for _, p in wanted], rtol=1e-3)


def test_answers_are_the_same_with_an_assistant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two slots, in whose caches windows move, and which go back."""
    model = tiny("gemma4", context_length=2048)
    path, head = written(model, tmp_path, "m.gguf"), written(assistant("gemma4_mtp", model), tmp_path, "head.gguf")
    spec = {"spec_type": parse_spec_type("mtp:p_min=0"), "model_draft": head}
    settings: dict[str, Any] = {"model": path, "n_ctx": 2048, "n_ubatch": 32}
    with serving(2, **settings) as e:
        plain = list(answers(e))
    helped([*PROMPTS, *plain], monkeypatch)
    with serving(2, server=spec, **settings) as e:
        assert e._worker.session.graph_config.n_window
        assert list(answers(e)) == plain
        metrics = e.metrics()
        assert metrics.draft_tokens_total > metrics.draft_tokens_accepted_total > 20
    # In stages it is with the layers whose cache it reads.
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)
    stages: dict[str, Any] = {"fleet": BatchConfig(stages=2), "n_threads": 2, "n_threads_batch": 2}
    with serving(2, server=spec, **(settings | stages)) as e:
        first = [Call(e, request(p, 40, id_slot=i)) for i, p in enumerate(PROMPTS[:2])]
        assert [[t.id for t in c.final.tokens] for c in first] == plain[:2]


def test_assistants_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny("gemma4")
    path, head = written(model, tmp_path, "m.gguf"), assistant("gemma4_mtp", model)
    with pytest.raises(UnsupportedError, match=r"head.gguf holds a head that reads .*-md"):
        Planner.of_file(RunConfig(model=written(head, tmp_path, "head.gguf")))
    other = written(tiny_model("llama"), tmp_path, "llama.gguf")
    with pytest.raises(FormatError, match="one for Gemma 4, but this is a model of llama"):
        opened(other, tmp_path / "head.gguf")
    for key, value, message in (
        ("backbone_embedding_length", 80, "of another model: its gemma4_mtp.backbone_embedding_length is 80"),
        ("attention.key_length", 64, "layer 2 has 4 heads of 64, which do not fit"),
    ):
        wrong = MemoryModel(head.metadata | {f"gemma4_mtp.{key}": value}, head.tensors)
        with pytest.raises(FormatError, match=message):
            opened(path, written(wrong, tmp_path, "wrong.gguf"))
    cut = MemoryModel(head.metadata, {n: t for n, t in head.tensors.items() if n != "mtp_post_proj.weight"})
    with pytest.raises(FormatError, match=r"mtp_post_proj.weight.*missing"):
        opened(path, written(cut, tmp_path, "cut.gguf"))


def test_an_assistant_is_planned(tmp_path: Path) -> None:
    """Its weights count, but for three factors that become part of the graph; its cache is the model's."""
    model = tiny("gemma4")
    path, head = written(model, tmp_path, "m.gguf"), written(assistant("gemma4_mtp", model), tmp_path, "head.gguf")
    server = ServerConfig(spec_type=(SpecStage("mtp"),), model_draft=head)
    plain = RunConfig(model=path, command="serve", n_parallel=1, **CPU)
    config = replace(plain, server=server)
    plans = [Planner.of_file(c).plan(c) for c in (plain, config)]
    weights = [sum(parts["weights"] for parts in plan.memory.parts.values()) for plan in plans]
    caches = [sum(plan.caches.values()) for plan in plans]
    size = sum(t.n_bytes for t in open_gguf(head).tensors.values())
    assert caches[0] == caches[1] and weights[1] - weights[0] == size - 3 * 4
