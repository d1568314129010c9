"""Loading and unloading of several models, with stand-ins for processes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_processes import FakeChild
from proxies import run

from ikcli.server.front.models import ModelSupervisor, ModelUse
from ikcli.server.front.models_entries import Group, ModelEntry, ModelsFile
from ikcli.server.front.models_events import Events
from ikcli.server.front.models_instance import SLEEPING, UNLOADED
from ikcli.server.front.supervisor import DOWN, DRAINING, READY
from ikcli.server.http.errors import ApiError
from ikcli.server.http.logs import ServerLog
from ikcli.settings.run import RunConfig


class Bench:
    """A supervisor of models of 10 bytes each on one device; `journal` has loads and unloads in order."""

    def __init__(self, names: str, budget: int, *groups: Group, broken: str = "", most: int = 0, **entry: Any) -> None:
        entries = {name: ModelEntry(name, (), RunConfig(), {"CPU": 10}, **entry) for name in names}
        self.journal: list[str] = []
        self.file = ModelsFile(Path("models.toml"), entries, groups, {"CPU": budget}, most)
        FakeChild.broken = frozenset(broken)
        self.supervisor = ModelSupervisor(self.file, self._child, Path(), ServerLog(out=io.StringIO()))  # type: ignore[arg-type]

    def _child(self, entry: ModelEntry, socket: Path) -> FakeChild:
        return FakeChild(entry, self.journal)

    async def use(self, name: str, until: Awaitable[Any] | None = None) -> None:
        async with self.supervisor.lease(ModelUse(name)):
            if until is not None:
                await until

    def listen(self) -> list[str]:
        """What is told from now on, as `model event status`."""
        told: list[str] = []

        def send(model: str, event: str, data: Any = None) -> None:
            told.append(" ".join((model, event, *([data["status"]] if data else []))))

        self.supervisor.events.send = send  # type: ignore[method-assign]
        return told

    def loaded(self) -> str:
        return "".join(name for name, one in self.supervisor.instances.items() if one.state == READY)


def test_the_least_recently_used_model_goes() -> None:
    async def work() -> None:
        b = Bench("abc", 25)
        for name in "abacb":
            await b.use(name)
        assert b.journal == ["+a", "+b", "-b", "+c", "-a", "+b"] and b.loaded() == "bc"
        await b.supervisor.close()
        assert sorted(b.journal[6:]) == ["-b", "-c"]

    run(work)


def test_requests_for_one_model_load_it_once() -> None:
    async def work() -> None:
        b = Bench("ab", 15)
        await asyncio.gather(*(b.use("a") for _ in range(5)), b.use("b"))
        assert b.journal.count("+a") == 1 and b.journal.count("+b") == 1
        await b.supervisor.close()

    run(work)


def test_running_requests_finish_before_their_model_is_unloaded() -> None:
    async def work() -> None:
        b = Bench("ab", 15)
        gate = asyncio.Event()
        first = asyncio.ensure_future(b.use("a", gate.wait()))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(b.use("b"))
        await asyncio.sleep(0.05)
        third = asyncio.ensure_future(b.use("a"))  # waits until the model is back
        await asyncio.sleep(0.05)
        assert b.journal == ["+a"] and not second.done() and not third.done()
        gate.set()
        await asyncio.gather(first, second, third)
        assert b.journal == ["+a", "-a", "+b", "-b", "+a"]
        await b.supervisor.close()

    run(work)


def test_idle_models_go_before_busy_ones() -> None:
    async def work() -> None:
        b = Bench("abc", 25)
        gate = asyncio.Event()
        busy = asyncio.ensure_future(b.use("a", gate.wait()))
        await asyncio.sleep(0.05)
        await b.use("b")
        await b.use("c")
        assert b.journal == ["+a", "+b", "-b", "+c"]
        gate.set()
        await busy
        await b.supervisor.close()

    run(work)


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests_only() -> None:
    async def work() -> None:
        b = Bench("ab", 25, broken="a")
        for _ in range(2):  # it is tried again
            with pytest.raises(ApiError, match="model a could not be loaded: the file is broken") as found:
                await b.use("a")
            assert found.value.status == 500
        await b.use("b")
        one = b.supervisor.instances["a"]
        assert one.state == DOWN and one.exit_code == 1 and not one.holds_memory and b.loaded() == "b"
        await b.supervisor.close()

    run(work)


def test_a_process_that_dies_is_started_again() -> None:
    async def work() -> None:
        b = Bench("a", 25)
        await b.use("a")
        child: Any = b.supervisor.instances["a"].process
        child.die()
        await asyncio.sleep(0.02)
        one = b.supervisor.instances["a"]
        assert one.state == DOWN and one.failure is not None and "SIGKILL" in one.failure.message
        await b.use("a")
        assert b.journal == ["+a", "+a"] and b.loaded() == "a"
        await b.supervisor.close()

    run(work)


def test_groups() -> None:
    async def work() -> None:
        b = Bench("abc", 100, Group("g", ("a", "b")))
        for name in "abc":
            await b.use(name)
        assert b.journal == ["+a", "-a", "+b", "+c"]
        await b.supervisor.close()
        b = Bench("abc", 25, Group("g", ("a", "b"), together=True))
        await b.use("a")
        await b.use("b")
        assert sorted(b.journal) == ["+a", "+b"]
        await b.use("c")
        assert b.loaded() == "c" and sorted(b.journal[2:4]) == ["-a", "-b"]
        await b.supervisor.load("b")
        await b.use("a")
        assert b.loaded() == "ab"
        await b.supervisor.unload("a")
        assert b.loaded() == ""
        await b.supervisor.close()

    run(work)


def test_ttl_and_preload() -> None:
    async def work() -> None:
        b = Bench("ab", 100, preload=True, ttl=0.01)
        await b.supervisor.preload()
        assert b.loaded() == "ab"
        gate = asyncio.Event()
        busy = asyncio.ensure_future(b.use("a", gate.wait()))
        watcher = asyncio.ensure_future(b.supervisor.watch_ttl())
        while b.loaded() != "a":
            await asyncio.sleep(0.02)
        gate.set()
        await busy
        while b.loaded():
            await asyncio.sleep(0.02)
        watcher.cancel()
        await b.supervisor.close()

    run(work)


def test_a_request_says_how_long_its_model_stays() -> None:
    async def work() -> None:
        b = Bench("ab", 100, ttl=0.01)
        await b.supervisor.load("a")
        b.supervisor.keep("a", -1)
        await b.supervisor.load("b")
        watcher = asyncio.ensure_future(b.supervisor.watch_ttl())
        while b.loaded() != "a":
            await asyncio.sleep(0.02)
        b.supervisor.keep("a", 0)
        while b.loaded():
            await asyncio.sleep(0.02)
        watcher.cancel()
        await b.supervisor.close()

    run(work)


def test_closing_ends_what_loads_and_refuses_what_comes() -> None:
    async def work() -> None:
        b = Bench("ab", 100)
        await b.use("b")
        waiting = asyncio.ensure_future(b.use("a"))
        await asyncio.sleep(0.005)
        await b.supervisor.close()
        assert sorted(b.journal) == ["+a", "+b", "-a", "-b"] and all(
            one.process is None for one in b.supervisor.instances.values()
        )
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        with pytest.raises(ApiError, match="shutting down"):
            await b.use("b")

    run(work)


def test_a_model_larger_than_what_is_free_is_tried_alone() -> None:
    async def work() -> None:
        b = Bench("ab", 5)
        await b.use("a")
        await b.use("b")
        assert b.journal == ["+a", "-a", "+b"]
        await b.supervisor.close()

    run(work)


def test_at_most_so_many_models_are_loaded() -> None:
    async def work() -> None:
        b = Bench("abc", 100, most=2)
        for name in "abacb":
            await b.use(name)
        assert b.journal == ["+a", "+b", "-b", "+c", "-a", "+b"] and b.loaded() == "bc"
        await b.supervisor.close()
        b = Bench("abc", 100, Group("g", ("a", "b"), together=True), most=2)
        await b.use("c")
        await b.use("a")
        assert b.loaded() == "ab" and b.journal[:2] == ["+c", "-c"]
        await b.supervisor.close()

    run(work)


def test_models_that_are_not_loaded_by_themselves() -> None:
    async def work() -> None:
        b = Bench("ab", 100, ttl=0.01, sleeps=True)
        with pytest.raises(ApiError, match="model a is not loaded; load it with POST /models/load") as found:
            async with b.supervisor.lease(ModelUse("a", loads=False)):
                pass
        assert found.value.status == 400 and b.journal == []
        loading = asyncio.ensure_future(b.supervisor.load("a"))
        await asyncio.sleep(0)
        async with b.supervisor.lease(ModelUse("a", loads=False)):  # what loads is waited for
            pass
        await loading
        watcher = asyncio.ensure_future(b.supervisor.watch_ttl())
        while b.supervisor.instances["a"].status != SLEEPING:
            await asyncio.sleep(0.02)
        watcher.cancel()
        async with b.supervisor.lease(ModelUse("a", loads=False)):  # and what sleeps is woken
            pass
        await b.supervisor.unload("a")
        with pytest.raises(ApiError, match="is not loaded"):
            async with b.supervisor.lease(ModelUse("a", loads=False)):
                pass
        await b.supervisor.close()

    run(work)


def test_a_model_that_sleeps_keeps_what_it_said() -> None:
    """Unlike one that was unloaded for another reason, its own time running out included if a request set that."""

    async def work() -> None:
        b = Bench("abc", 100, ttl=0.05, sleeps=True)
        told = b.listen()
        for name in "abc":
            await b.supervisor.load(name)
        b.supervisor.keep("b", 0)
        b.supervisor.keep("c", -1)
        watcher = asyncio.ensure_future(b.supervisor.watch_ttl())
        while b.loaded() != "c":
            await asyncio.sleep(0.02)
        a, other, _ = b.supervisor.instances.values()
        assert (a.status, other.status) == (SLEEPING, UNLOADED)
        assert json.loads(a.kept[b"/props"][1]) == {"is_sleeping": False} and not other.kept
        await b.use("a")
        assert a.state == READY and not a.kept
        assert [one for one in told if one[0] == "a"] == [
            f"a model_status {status}" for status in ("loading", "loaded", "sleeping", "loading", "loaded")
        ]
        assert "b model_status unloaded" in told
        watcher.cancel()
        await b.supervisor.close()

    run(work)


def test_a_new_list_of_models() -> None:
    """New ones appear, those that have gone or changed end when their requests are done, the others stay."""

    async def work() -> None:
        b = Bench("abc", 100)
        for name in "abc":
            await b.use(name)
        gate = asyncio.Event()
        busy = asyncio.ensure_future(b.use("b", gate.wait()))
        await asyncio.sleep(0.02)
        told = b.listen()
        kept, gone, changed = b.file.entries.values()
        entries = {
            "a": replace(kept, ttl=9),
            "c": replace(changed, argv=("--ctx-size=5",)),
            "d": replace(gone, name="d"),
        }
        b.supervisor.update(replace(b.file, entries=entries))
        assert list(b.supervisor.instances) == ["a", "c", "d"] and b.loaded() == "a"
        assert b.supervisor.instances["a"].ttl == 9 and told == ["b model_remove", "* models_reload"]
        with pytest.raises(ApiError, match="model 'b' is not served any more") as found:
            await b.use("b")
        assert found.value.status == 404
        await b.use("c")
        assert b.journal == ["+a", "+b", "+c", "-c", "+c"] and not busy.done(), "it is still answering"
        gate.set()
        await busy
        while "-b" not in b.journal:
            await asyncio.sleep(0.01)
        assert b.loaded() == "ac"
        await b.supervisor.remove("c")
        assert b.journal[-1] == "-c" and list(b.supervisor.instances) == ["a", "d"] and told[-1] == "c model_remove"
        await b.supervisor.close()

    run(work)


def test_models_that_leave_hold_their_memory_until_they_have_ended() -> None:
    async def work() -> None:
        b = Bench("ab", 15)
        gate = asyncio.Event()
        busy = asyncio.ensure_future(b.use("a", gate.wait()))
        await asyncio.sleep(0.05)
        b.supervisor.update(replace(b.file, entries={"b": b.file.entries["b"]}))
        waiting = asyncio.ensure_future(b.use("b"))
        await asyncio.sleep(0.05)
        assert b.journal == ["+a"] and not waiting.done()
        gate.set()
        await asyncio.gather(busy, waiting)
        assert b.journal == ["+a", "-a", "+b"]
        await b.supervisor.close()

    run(work)


def test_requests_are_cut_when_the_time_to_stop_is_over() -> None:
    async def work() -> None:
        b = Bench("a", 100, stop_timeout=0.02)
        gate = asyncio.Event()
        busy = asyncio.ensure_future(b.use("a", gate.wait()))
        await asyncio.sleep(0.02)
        child: Any = b.supervisor.instances["a"].process
        killed = []
        child.kill = lambda: killed.append(b.supervisor.instances["a"].state)
        await b.supervisor.unload("a")
        assert killed == [DRAINING] and not busy.done() and b.loaded() == ""
        gate.set()
        await busy
        await b.supervisor.close()

    run(work)


def test_events_reach_all_listeners_and_end_with_them() -> None:
    async def work() -> None:
        events, gone = Events(), asyncio.Event()

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def never() -> dict[str, str]:
            await asyncio.Event().wait()
            return {}

        first, second = events.listen(receive, 0), events.listen(never, 0.01)  # type: ignore[arg-type]
        assert await anext(first) == await anext(second) == await anext(second) == b":\n\n"
        events.send("a", "model_status", {"status": "loading"})
        events.send("*", "models_reload")
        chunks = [await anext(first), await anext(first)]
        assert [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks] == [
            {"model": "a", "event": "model_status", "data": {"status": "loading"}},
            {"model": "*", "event": "models_reload"},
        ]
        gone.set()
        assert [chunk async for chunk in first] == []
        events.close()
        assert [chunk async for chunk in second if chunk != b":\n\n"] == chunks
        events.send("a", "model_remove")  # to nobody

    run(work)
