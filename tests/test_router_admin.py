"""Changes of the list of models while the server runs: through its application, with stand-ins for processes."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import FakeHub
from fake_processes import FakeChild
from hub_fixtures import hub, server  # noqa: F401  (fixtures)
from hub_models import model_bytes, part_bytes
from proxies import run

from ikcli.cli.model_list import Sources
from ikcli.cli.parser import parse
from ikcli.server.front.models import ModelSupervisor
from ikcli.server.front.models_app import build_app
from ikcli.server.front.models_state import ModelsState
from ikcli.server.http.auth import read_keys
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.users import read_users
from ikcli.settings.run import default_model

USERS = '[anna]\nkey = "a"\n'


@pytest.fixture
def demo(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/a.gguf").symlink_to(default_model())
    hub.add("user/repo", {"x-Q4_0.gguf": model_bytes(), "y-Q8_0.gguf": b"no model"})
    return hub


class Front:
    """A server of several models in this loop; `told` is what listeners hear."""

    def __init__(self, *line: str) -> None:
        self.sources = Sources(parse("serve", ["--models-dir", "models", "-c", "256", *line]))
        config = parse("serve", list(line)).config
        self.journal: list[str] = []
        self.told: list[tuple[str, str, Any]] = []
        log = ServerLog(out=io.StringIO())

        def child(entry: Any, socket: Path) -> FakeChild:
            return FakeChild(entry, self.journal)

        self.supervisor = ModelSupervisor(self.sources.read(), child, Path(), log)  # type: ignore[arg-type]
        self.supervisor.events.send = lambda *told: self.told.append((*told, None)[:3])  # type: ignore[method-assign]
        keys, users = read_keys(config.server), read_users(config.server.keys)
        self.state = ModelsState(config, self.supervisor, keys, log, users, read=self.sources.read)
        transport = httpx.ASGITransport(app=build_app(self.state))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return await self.client.request(method, path, json=body, headers=headers)

    async def error(self, status: int, method: str, path: str, body: Any = None, **headers: str) -> str:
        answer = await self.ask(method, path, body, **headers)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    async def list(self, query: str = "") -> dict[str, str]:
        data = (await self.ask("GET", f"/v1/models{query}")).json()["data"]
        return {one["id"]: one["status"]["value"] for one in data}

    async def wait(self, event: str) -> Any:
        while not (found := [told for told in self.told if told[1] == event]):
            await asyncio.sleep(0.01)
        return found[-1]


def test_the_list_says_what_a_model_is(demo: FakeHub) -> None:
    async def work() -> None:
        front = Front()
        (one,) = (await front.ask("GET", "/models")).json()["data"]
        assert one["id"] == "a" and one["path"] == "models/a.gguf" and one["source"] == "folder"
        assert one["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert "--ctx-size=256" in one["status"]["args"] and one["status"]["value"] == "unloaded"
        assert (await front.ask("POST", "/models/load", {"model": "a"})).json() == {"success": True}
        (one,) = (await front.ask("GET", "/models")).json()["data"]
        assert one["meta"] == {"name": "a"} and one["status"]["value"] == "loaded"
        statuses = [(model, data["status"]) for model, event, data in front.told if event == "model_status"]
        assert statuses == [("a", "loading"), ("a", "loaded")] and front.told[-1][2]["info"]["meta"] == {"name": "a"}
        await front.supervisor.close()

    run(work)


def test_sources_are_looked_at_again(demo: FakeHub) -> None:
    async def work() -> None:
        front = Front()
        await front.ask("POST", "/models/load", {"model": "a"})
        Path("models/b.gguf").write_bytes(model_bytes())
        assert await front.list() == {"a": "loaded"}
        assert await front.list("?reload=1") == {"a": "loaded", "b": "unloaded"}
        Path("models/a.gguf").unlink()
        assert await front.list("?reload=1") == {"b": "unloaded"}
        await front.wait("model_remove")
        while front.journal != ["+a", "-a"]:
            await asyncio.sleep(0.01)
        Path("models/b.gguf").unlink()
        assert await front.list("?reload=true") == {}
        answer = await front.error(404, "POST", "/completion", {"prompt": "x"})
        assert answer == "this server has no model yet; POST /models downloads one"
        Path("models").rmdir()
        answer = await front.error(500, "GET", "/models?reload=1")
        assert answer.startswith("the list of models stays as it was: --models-dir models: cannot read models")
        assert "reload must be true or false" in await front.error(400, "GET", "/models?reload=maybe")
        await front.supervisor.close()

    run(work)


def test_models_are_loaded_by_themselves_or_not(demo: FakeHub) -> None:
    async def work() -> None:
        front = Front("--no-models-autoload")
        for query in ("", "?autoload=false"):
            answer = await front.error(400, "POST", f"/completion{query}", {"model": "a", "prompt": "x"})
            assert answer.startswith("model a is not loaded; load it with POST /models/load")
        assert "autoload must be true or false" in await front.error(
            400, "POST", "/completion?autoload=2", {"model": "a"}
        )
        assert not front.journal
        await front.supervisor.close()
        front = Front()
        assert "is not loaded" in await front.error(400, "POST", "/completion?autoload=0", {"model": "a"})
        await front.supervisor.close()

    run(work)


def test_a_model_is_downloaded_served_and_deleted(demo: FakeHub) -> None:
    Path("p.ini").write_text("[mine]\nhf-repo = user/repo:Q4_0\n")
    demo.add("user/parts", {f"p-Q4_0-{i:05d}-of-00003.gguf": data for i, data in enumerate(part_bytes(3), 1)})

    async def work() -> None:
        front = Front("--models-preset", "p.ini")
        assert "is that of mine, too" in await front.error(400, "DELETE", "/models?model=user/repo:Q4_0")
        assert (await front.ask("POST", "/models", {"model": "user/parts"})).json() == {"success": True}
        assert "is being downloaded" in await front.error(503, "POST", "/completion", {"model": "user/parts:Q4_0"})
        model, _, _ = await front.wait("download_finished")
        assert model == "user/parts:Q4_0" and (await front.list())[model] == "unloaded"
        assert all(one["done"] == one["total"] for one in (await front.wait("download_progress"))[2].values())
        progress = [data for _, event, data in front.told if event == "download_progress"]
        files = progress[-1]
        assert len(files) == 3 and all(url.startswith(f"{demo.url}/user/parts/resolve/") for url in files)
        assert all(0 <= one["done"] <= one["total"] for data in progress for one in data.values())
        assert "has been downloaded already" not in await front.error(
            400, "POST", "/models", {"model": "user/parts:Q4_0"}
        )
        await front.ask("POST", "/models/load", {"model": model})
        path = front.supervisor.instances[model].entry.config.model
        assert path is not None and path.is_file()
        assert "only those can be deleted" in await front.error(400, "DELETE", "/models?model=a")
        assert (await front.ask("DELETE", f"/models?model={model}")).json() == {"success": True}
        assert list(await front.list()) == ["mine", "a", "user/repo:Q4_0"] and not path.exists()
        assert front.journal == [f"+{model}", f"-{model}"] and (model, "model_remove", None) in front.told
        assert "not found" in await front.error(404, "DELETE", f"/models?model={model}")
        assert "?model=NAME is required" in await front.error(400, "DELETE", "/models")
        await front.supervisor.close()

    run(work)


def test_downloads_that_cannot_begin_or_end(demo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        front = Front()
        for name, message in (
            ("nonsense", '"nonsense" is not user/repo'),
            ("user/absent", "user/absent does not exist"),
            ("user/repo:Q2_K", "user/repo has no Q2_K"),
            ("a", "model a is there already"),
        ):
            assert message in await front.error(400, "POST", "/models", {"model": name})
        assert "model is required" in await front.error(400, "POST", "/models", {})
        demo.faults.flip = True
        await front.ask("POST", "/models", {"model": "user/repo:Q4_0"})
        model, _, data = await front.wait("download_failed")
        assert model == "user/repo:Q4_0" and "damaged" in data["error"]
        demo.faults.flip = False
        front.told.clear()
        await front.ask("POST", "/models", {"model": "user/repo:Q8_0"})  # it arrives, and is no model
        await front.wait("download_finished")
        assert await front.list() == {"a": "unloaded"}
        assert "has been downloaded already" in await front.error(400, "POST", "/models", {"model": "user/repo:Q8_0"})
        await front.supervisor.close()

    run(work)


def test_a_download_is_cancelled(demo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """By unloading the model; what has arrived is kept."""
    from ikcli.hub import client, download

    monkeypatch.setattr(download, "_PIECE", 100_000)
    stream, waits, goes_on = client.stream, threading.Event(), threading.Event()

    def slow(url: str, token: str, start: int = 0, *rest: Any) -> Any:
        if start:
            waits.set()
            goes_on.wait(30)
        return stream(url, token, start, *rest)

    monkeypatch.setattr(client, "stream", slow)

    async def work() -> None:
        front = Front()
        name = {"model": "user/repo:Q4_0"}
        await front.ask("POST", "/models", name)
        while not waits.is_set():
            await asyncio.sleep(0.01)
        assert "is being downloaded already" in await front.error(400, "POST", "/models", name)
        data = (await front.ask("GET", "/models")).json()["data"]
        (progress,) = data[1]["status"]["progress"].values()
        assert data[1]["status"]["value"] == "downloading" and progress == {
            "done": 100_000,
            "total": len(model_bytes()),
        }
        assert (await front.ask("POST", "/models/unload", name)).json() == {"success": True}
        assert "is being cancelled" in await front.error(400, "POST", "/models", name)
        goes_on.set()
        assert (await front.wait("download_failed"))[2] == {"error": "it was cancelled"}
        assert await front.list() == {"a": "unloaded"} and list(Path("hub").rglob("*.incomplete"))
        await front.ask("POST", "/models", name)
        await front.wait("download_finished")
        assert (await front.list())["user/repo:Q4_0"] == "unloaded"
        await front.supervisor.close()

    run(work)


def test_who_may_change_which_models_there_are(demo: FakeHub, tmp_path: Path) -> None:
    """No user with limits, no page of another origin without a key, nobody without the key of a server that has one."""
    keys = tmp_path / "keys.toml"
    keys.write_text(USERS)
    keys.chmod(0o600)
    name = {"model": "user/repo:Q4_0"}
    calls = (("POST", "/models", name), ("DELETE", "/models?model=a", None))

    async def work() -> None:
        front = Front("--keys", str(keys), "--api-key", "k")
        for method, path, body in calls:
            assert "Invalid API Key" in await front.error(401, method, path, body)
            assert "a user may not change" in await front.error(403, method, path, body, authorization="Bearer a")
        assert "Invalid API Key" in await front.error(401, "GET", "/models?reload=1")
        assert "Invalid API Key" in await front.error(401, "GET", "/models/sse")
        assert (await front.ask("GET", "/models")).status_code == 200
        evil = {"authorization": "Bearer k", "origin": "https://evil.example"}
        assert "only those can be deleted" in await front.error(400, "DELETE", "/models?model=a", **evil)
        await front.supervisor.close()
        front = Front()
        for method, path, body in calls:
            answer = await front.error(403, method, path, body, origin="https://evil.example")
            assert answer == "web pages of evil.example may do this only if the server has an --api-key"
        for origin in ("http://localhost:3000", "http://test"):
            assert "only those can" in await front.error(400, "DELETE", "/models?model=a", origin=origin)
        await front.supervisor.close()
        front = Front("--no-models-cache")
        for method, path, body in calls:
            assert "start it with --models-cache" in await front.error(400, method, path, body)
        await front.supervisor.close()

    run(work)
