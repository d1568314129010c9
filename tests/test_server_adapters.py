"""Adapters of a server: listed, scaled for all requests or for one; caches belong to the scales they were made with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from adapter_files import low_rank, write_adapter
from engine_client import Call, ask, request, serving
from factories import tiny_model
from fake_engine import FakeEngine, fake_tokenizer
from gguf_files import write_model
from server_client import Client
from test_server_http import error_of

from ikcli.engine.run.session import Session
from ikcli.gguf.reader import open_gguf
from ikcli.server.slots import slot_file
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.states import EngineError
from ikcli.settings.adapters import AdapterConfig
from ikcli.settings.records import ScaledFile
from ikcli.settings.run import RunConfig, default_model

PROMPT = "def parse(text):\n    return"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the demo model that changes what it says."""
    file, rng, tensors = open_gguf(default_model()), np.random.default_rng(1), {}
    for name, t in file.tensors.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            n_cols, n_rows = t.shape
            tensors[f"{name}.lora_a"] = rng.normal(0, 1, (4, n_cols)).astype(np.float32)
            tensors[f"{name}.lora_b"] = rng.normal(0, 0.1, (n_rows, 4)).astype(np.float32)
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a.gguf", file.arch, tensors)


def texts(scale: float, adapter: Path) -> str:
    """What a server says that has the adapter with this scale from the start."""
    scaled = AdapterConfig(lora_scaled=(ScaledFile(adapter, scale),))
    with serving(1, adapters=scaled if scale else AdapterConfig()) as engine:
        return ask(engine, PROMPT, 24).text


@pytest.fixture(scope="module")
def said(adapter: Path) -> dict[float, str]:
    found = {scale: texts(scale, adapter) for scale in (0.0, 1.0, 0.5)}
    assert len(set(found.values())) == 3
    return found


@pytest.fixture
def engine(adapter: Path) -> Iterator[Engine]:
    with serving(3, adapters=AdapterConfig(lora=(adapter,))) as engine:
        yield engine


def test_scales_of_the_server_and_of_requests(engine: Engine, adapter: Path, said: dict[float, str]) -> None:
    assert engine.model.adapters == (str(adapter),) and engine.scales == (1.0,)
    assert ask(engine, PROMPT, 24).text == said[1.0]
    assert ask(engine, PROMPT, 24, lora=(0.0,)).text == said[0.0]
    engine.set_scales((0.5,))
    assert ask(engine, PROMPT, 24).text == said[0.5] and engine.scales == (0.5,)
    assert ask(engine, PROMPT, 24, lora=(1.0,)).text == said[1.0]
    with pytest.raises(EngineError, match="2 scales of adapters for 1 adapters"):
        engine.set_scales((0.5, 1.0))


def test_requests_with_different_scales_at_the_same_time(engine: Engine, said: dict[float, str]) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    calls = {scale: Call(engine, request(ids, 24, lora=(scale,))) for scale in (0.0, 0.5, 1.0)}
    assert {scale: call.final.text for scale, call in calls.items()} == said


def test_a_prompt_is_reused_with_the_same_scales_only(engine: Engine) -> None:
    prompt = engine.tokenizer.encode(PROMPT * 4)
    first = ask(engine, prompt, 1, id_slot=0)
    again = ask(engine, prompt, 1, id_slot=0)
    other = ask(engine, prompt, 1, id_slot=0, lora=(0.25,))
    back = ask(engine, prompt, 1, id_slot=0)
    assert first.timings.cache_n == other.timings.cache_n == 0
    assert again.timings.cache_n == back.timings.cache_n == len(prompt) - 1  # back: from the prompts kept in RAM
    copied = ask(engine, prompt, 1, id_slot=1)  # from slot 0
    assert copied.timings.cache_n == len(prompt) - 1
    assert ask(engine, prompt, 1, id_slot=2, lora=(0.7,)).timings.cache_n == 0


def test_saved_slots_belong_to_scales(engine: Engine, tmp_path: Path) -> None:
    prompt = engine.tokenizer.encode(PROMPT * 4)
    ask(engine, prompt, 1, id_slot=0)
    path = tmp_path / "slot.bin"
    engine.slot_action(0, "save", path).result(60)
    engine.set_scales((0.5,))
    with pytest.raises(EngineError, match="was saved with other scales of adapters"):
        engine.slot_action(1, "restore", path).result(60)
    engine.set_scales((1.0,))
    assert engine.slot_action(1, "restore", path).result(60).n_tokens == len(prompt)
    assert ask(engine, prompt, 1, id_slot=1).timings.cache_n == len(prompt) - 1


def test_files_of_slots_tell_adapters_apart(tmp_path: Path) -> None:
    """By what is in them and their order, not by what their files are called."""
    model = tiny_model("llama")
    path = write_model(model, tmp_path / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})
    files = [
        write_adapter(tmp_path / name, "llama", low_rank(model, ["blk.0.attn_output.weight"], seed=seed))
        for name, seed in (("a.gguf", 1), ("b.gguf", 2), ("c.gguf", 1))
    ]
    marks = []
    for chosen in ((), files[:1], files[1:2], files[2:], files[:2], files[1::-1]):
        config = RunConfig(model=path, n_ctx=256, adapters=AdapterConfig(lora=tuple(chosen)))
        marks.append(slot_file.fingerprint(Session.plan(config)))
    assert marks[1] == marks[3] and len(set(marks)) == 5


def test_loaded_without_effect(adapter: Path, said: dict[float, str]) -> None:
    with serving(1, adapters=AdapterConfig(lora=(adapter,), lora_init_without_apply=True)) as engine:
        assert engine.scales == (0.0,) and ask(engine, PROMPT, 24).text == said[0.0]


def client() -> Client:
    engine = FakeEngine(fake_tokenizer())
    engine.model = replace(engine.model, adapters=("a.gguf", "b.gguf"))
    engine.scales = (1.0, 0.5)
    return Client(engine=engine)


def test_endpoints() -> None:
    c = client()
    assert c.get("/lora-adapters").json() == [
        {"id": 0, "path": "a.gguf", "scale": 1.0},
        {"id": 1, "path": "b.gguf", "scale": 0.5},
    ]
    assert c.post("/lora-adapters", [{"id": 1, "scale": 0.25}]).json() == {"success": True}
    assert c.engine.scales == (0.0, 0.25)
    for value, words in (
        ([{"id": 2, "scale": 1}], "invalid adapter id 2, ids are 0 to 1"),
        ([{"id": 0}], "[0].scale is required"),
        ([{"id": 0, "scale": "much"}], "[0].scale must be a number"),
        ({"id": 0, "scale": 1}, "must be an array"),
    ):
        assert words in error_of(c.post("/lora-adapters", value), 400)


def test_field_of_a_request() -> None:
    c = client()
    for lora, wanted in ((None, None), ([], (0.0, 0.0)), ([{"id": 1, "scale": -2}], (0.0, -2.0))):
        body = {"prompt": "a"} | ({} if lora is None else {"lora": lora})
        answer = c.post("/completion", body)
        assert c.engine.requests[-1].lora == wanted
        shown = answer.json()["generation_settings"]["lora"]
        assert shown == [{"id": i, "scale": s} for i, s in enumerate(wanted or ())]
    error_of(c.post("/completion", {"prompt": "a", "lora": [{"id": 5, "scale": 1}]}), 400)
    chat = {"messages": [{"role": "user", "content": "a"}], "lora": [{"id": 0, "scale": 3}]}
    assert c.post("/v1/chat/completions", chat).status_code == 200 and c.engine.requests[-1].lora == (3.0, 0.0)
