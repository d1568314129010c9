"""Control vectors of a server: loaded, scaled and unloaded while it runs; caches belong to what was applied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_control_vector
from engine_client import Call, ask, request, serving
from server_client import Client
from test_server_http import error_of

from ikcli.gguf.reader import open_gguf
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Delta
from ikcli.server.slots.states import EngineError
from ikcli.server.slots.vectors import VectorChange
from ikcli.settings.adapters import AdapterConfig
from ikcli.settings.records import ScaledFile
from ikcli.settings.run import RunConfig, default_model

PROMPT = "def parse(text):\n    return"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two control vectors of the demo model, which change what it says."""
    found = tmp_path_factory.mktemp("vectors")
    width = open_gguf(default_model()).metadata["deepseek2.embedding_length"]
    for i, name in enumerate(("a.gguf", "b.gguf")):
        rng = np.random.default_rng(i)
        write_control_vector(found / name, {f"direction.{il}": rng.normal(0, 5, width) for il in (1, 2)})
    return found


def texts(**adapters: Any) -> str:
    """What a server says that has these from the start."""
    with serving(1, adapters=AdapterConfig(**adapters)) as engine:
        return ask(engine, PROMPT, 24).text


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    found = {
        "": texts(), "a": texts(control_vector=(folder / "a.gguf",)),
        "ab": texts(control_vector_scaled=(ScaledFile(folder / "a.gguf", 0.5), ScaledFile(folder / "b.gguf", -1.0))),
    }  # fmt: skip
    assert len(set(found.values())) == 3
    return found


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with serving(3, adapters=AdapterConfig(control_vector_path=folder)) as engine:
        yield engine


def load(engine: Engine, folder: Path, name: str, scale: float = 1.0) -> int:
    return engine.vectors.load(name, folder / name, scale, None, None)


def test_what_is_said(engine: Engine, folder: Path, said: dict[str, str]) -> None:
    assert ask(engine, PROMPT, 24).text == said[""]
    assert load(engine, folder, "a.gguf") == 0 and ask(engine, PROMPT, 24).text == said["a"]
    assert load(engine, folder, "b.gguf", -1.0) == 1 and load(engine, folder, "a.gguf", 0.5) == 0
    assert ask(engine, PROMPT, 24).text == said["ab"]
    engine.vectors.unload(1)
    engine.vectors.apply([VectorChange(0, 1.0)])
    assert ask(engine, PROMPT, 24).text == said["a"]
    engine.vectors.apply([])
    assert ask(engine, PROMPT, 24).text == said[""]


def test_scales_and_layers_of_a_list(engine: Engine, folder: Path) -> None:
    """What is not named gets scale 0 and keeps its layers; 0 is a layer like others."""
    for name in sorted(path.name for path in folder.iterdir())[:2]:
        load(engine, folder, name)
    served = engine.vectors
    n = len(served.items)
    assert n == 2
    layers = [(item.use.first, item.use.last) for item in served.items]
    served.apply([VectorChange(1, 0.5, 0, 0)])
    assert [(i.use.scale, i.use.first, i.use.last) for i in served.items] == [(0.0, *layers[0]), (0.5, 0, 0)]
    served.apply([VectorChange(0, -1.0, last=2)])
    assert [(i.use.scale, i.use.first, i.use.last) for i in served.items] == [(-1.0, layers[0][0], 2), (0.0, 0, 0)]
    names = [item.name for item in served.items]
    served.unload(0)
    assert [item.name for item in served.items] == names[1:]


def test_a_request_keeps_what_it_began_with(engine: Engine, folder: Path, said: dict[str, str]) -> None:
    call = Call(engine, request(engine.tokenizer.encode(PROMPT), 24))
    call.wait_for(lambda events: any(isinstance(e, Delta) for e in events))
    load(engine, folder, "a.gguf")
    other = Call(engine, request(engine.tokenizer.encode(PROMPT), 24))
    assert (call.final.text, other.final.text) == (said[""], said["a"])


def test_caches_belong_to_what_was_applied(engine: Engine, folder: Path, tmp_path: Path) -> None:
    prompt = engine.tokenizer.encode(PROMPT * 4)
    ask(engine, prompt, 1, id_slot=0)
    load(engine, folder, "a.gguf")
    assert ask(engine, prompt, 1, id_slot=0).timings.cache_n == 0
    assert ask(engine, prompt, 1, id_slot=0).timings.cache_n == len(prompt) - 1
    engine.slot_action(0, "save", tmp_path / "slot.bin").result(60)
    engine.vectors.unload(0)
    assert ask(engine, prompt, 1, id_slot=0).timings.cache_n == len(prompt) - 1  # from the prompts kept in RAM
    with pytest.raises(EngineError, match="was saved with other scales of adapters or control vectors"):
        engine.slot_action(1, "restore", tmp_path / "slot.bin").result(60)
    load(engine, folder, "a.gguf")
    assert engine.slot_action(1, "restore", tmp_path / "slot.bin").result(60).n_tokens == len(prompt)
    assert ask(engine, prompt, 1, id_slot=1).timings.cache_n == len(prompt) - 1


def client(folder: Path) -> Client:
    return Client(config=RunConfig(command="serve", adapters=AdapterConfig(control_vector_path=folder)))


def test_endpoints(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_control_vector(tmp_path / name, {"direction.2": np.full(8, ord(name[0]))})
    c = client(tmp_path)
    assert c.get("/control-vectors").json() == []
    assert c.post("/control-vectors/load", {"path": "a.gguf"}).json() == {"success": True, "id": 0}
    body = {"path": str(tmp_path / "b.gguf"), "scale": -0.5, "layer_start": 2, "layer_end": 3}
    assert c.post("/control-vectors/load", body).json() == {"success": True, "id": 1}
    assert c.post("/control-vectors/load", {"path": "a.gguf", "scale": 0}).json() == {"success": True, "id": 0}
    first = {"id": 0, "path": "a.gguf", "scale": 0.0, "layer_start": 1, "layer_end": 4, "applied": False}
    second = {"id": 1, "path": "b.gguf", "scale": -0.5, "layer_start": 2, "layer_end": 3, "applied": True}
    assert c.get("/control-vectors").json() == [first, second]
    assert [use[1:] for use in c.engine.used] == [(-0.5, 2, 3)]
    assert c.post("/control-vectors/apply", [{"id": 0, "scale": 2, "layer_end": 1}]).json() == {"success": True}
    assert [use[1:] for use in c.engine.used] == [(2.0, 1, 1)]
    assert c.post("/control-vectors/unload", {"id": 0}).json() == {"success": True}
    assert c.engine.used == () and [v["path"] for v in c.get("/control-vectors").json()] == ["b.gguf"]


def test_requests_that_are_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    folder.mkdir()
    write_control_vector(tmp_path / "outside.gguf", {"direction.1": np.ones(8)})
    write_control_vector(folder / "wide.gguf", {"direction.1": np.ones(9)})
    write_control_vector(folder / "v.gguf", {"direction.1": np.ones(8)})
    (folder / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (folder / "text.gguf").write_text("no model")
    c = client(folder)
    for path, value, words in (
        ("load", {}, "path is required"),
        ("load", {"path": "../outside.gguf"}, "give a plain file name without folders"),
        ("load", {"path": str(tmp_path / "outside.gguf")}, "give a plain file name without folders"),
        ("load", {"path": "link.gguf"}, "leads out of the folder"),
        ("load", {"path": "missing.gguf"}, "missing.gguf"),
        ("load", {"path": "text.gguf"}, "text.gguf"),
        ("load", {"path": "wide.gguf"}, "wide.gguf: 'direction.1' should hold 8 float32 values"),
        ("load", {"path": "v.gguf", "scale": "much"}, "scale must be a number"),
        ("load", {"path": "v.gguf", "layer_start": 1.5}, "layer_start must be"),
        ("unload", {}, "id is required"),
        ("unload", {"id": 0}, "invalid control vector id 0, none is loaded"),
        ("apply", {}, "must be an array"),
        ("apply", [{"id": 0}], "[0].scale is required"),
        ("apply", [{"id": 3, "scale": 1}], "invalid control vector id 3, none is loaded"),
    ):
        message = error_of(c.post(f"/control-vectors/{path}", value), 400)
        assert words in message and str(folder) not in message
    assert c.get("/control-vectors").json() == [] and c.engine.used == ()
    c.post("/control-vectors/load", {"path": "v.gguf"})
    assert "ids are 0 to 0" in error_of(
        c.post("/control-vectors/apply", [{"id": 0, "scale": 2}, {"id": 1, "scale": 1}]), 400
    )
    assert [use.scale for use in c.engine.used] == [1.0]
