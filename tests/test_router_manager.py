"""Loading and unloading of several models, with processes that are none."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ikcli.config import RunConfig
from ikcli.server.http.errors import ApiError
from ikcli.server.http.logs import ServerLog
from ikcli.server.router.child import LoadError
from ikcli.server.router.entries import Group, ModelEntry, ModelsFile
from ikcli.server.router.manager import LOADED, UNLOADED, Manager


class FakeChild:
    """`broken`: the names of models that cannot be loaded."""

    broken: frozenset[str] = frozenset()

    def __init__(self, entry: ModelEntry, journal: list[str]) -> None:
        self.name, self.journal = entry.name, journal
        self.exit_code: int | None = None
        self.socket = ""
        self._ended = asyncio.Event()

    async def load(self) -> None:
        self.journal.append(f"+{self.name}")
        await asyncio.sleep(0.01)
        if self.name in self.broken:
            self.exit_code = 1
            raise LoadError("the file is broken")

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.journal.append(f"-{self.name}")
        self.exit_code = 0
        self._ended.set()

    def kill(self) -> None:
        self.die()

    def die(self) -> None:
        self.exit_code = -9
        self._ended.set()

    def last_words(self) -> str:
        return "its process ended by signal SIGKILL"


class Bench:
    """A manager of models of 10 bytes each on one device; `journal` has loads and unloads in order."""

    def __init__(self, names: str, budget: int, *groups: Group, broken: str = "", **entry: Any) -> None:
        entries = {name: ModelEntry(name, (), RunConfig(), {"CPU": 10}, **entry) for name in names}
        self.journal: list[str] = []
        self.file = ModelsFile(Path("models.toml"), entries, groups, {"CPU": budget})
        FakeChild.broken = frozenset(broken)
        self.manager = Manager(self.file, self._child, Path(), ServerLog(out=io.StringIO()))  # type: ignore[arg-type]

    def _child(self, entry: ModelEntry, socket: Path) -> FakeChild:
        return FakeChild(entry, self.journal)

    async def use(self, name: str, until: Awaitable[Any] | None = None) -> None:
        async with self.manager.lease(name):
            if until is not None:
                await until

    def loaded(self) -> str:
        return "".join(name for name, one in self.manager.instances.items() if one.state == LOADED)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(limited())


def test_the_least_recently_used_model_goes() -> None:
    async def work() -> None:
        b = Bench("abc", 25)
        for name in "abacb":
            await b.use(name)
        assert b.journal == ["+a", "+b", "-b", "+c", "-a", "+b"] and b.loaded() == "bc"
        await b.manager.close()
        assert sorted(b.journal[6:]) == ["-b", "-c"]

    run(work)


def test_requests_for_one_model_load_it_once() -> None:
    async def work() -> None:
        b = Bench("ab", 15)
        await asyncio.gather(*(b.use("a") for _ in range(5)), b.use("b"))
        assert b.journal.count("+a") == 1 and b.journal.count("+b") == 1
        await b.manager.close()

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
        await b.manager.close()

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
        await b.manager.close()

    run(work)


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests_only() -> None:
    async def work() -> None:
        b = Bench("ab", 25, broken="a")
        for _ in range(2):  # it is tried again
            with pytest.raises(ApiError, match="model a could not be loaded: the file is broken") as found:
                await b.use("a")
            assert found.value.status == 500
        await b.use("b")
        one = b.manager.instances["a"]
        assert one.state == UNLOADED and one.exit_code == 1 and not one.holds_memory and b.loaded() == "b"
        await b.manager.close()

    run(work)


def test_a_process_that_dies_is_started_again() -> None:
    async def work() -> None:
        b = Bench("a", 25)
        await b.use("a")
        child: Any = b.manager.instances["a"].child
        child.die()
        await asyncio.sleep(0.02)
        one = b.manager.instances["a"]
        assert one.state == UNLOADED and one.failure is not None and "SIGKILL" in one.failure.message
        await b.use("a")
        assert b.journal == ["+a", "+a"] and b.loaded() == "a"
        await b.manager.close()

    run(work)


def test_groups() -> None:
    async def work() -> None:
        b = Bench("abc", 100, Group("g", ("a", "b")))
        for name in "abc":
            await b.use(name)
        assert b.journal == ["+a", "-a", "+b", "+c"]
        await b.manager.close()
        b = Bench("abc", 25, Group("g", ("a", "b"), together=True))
        await b.use("a")
        await b.use("b")
        assert sorted(b.journal) == ["+a", "+b"]
        await b.use("c")
        assert b.loaded() == "c" and sorted(b.journal[2:4]) == ["-a", "-b"]
        await b.manager.load("b")
        await b.use("a")
        assert b.loaded() == "ab"
        await b.manager.unload("a")
        assert b.loaded() == ""
        await b.manager.close()

    run(work)


def test_ttl_and_preload() -> None:
    async def work() -> None:
        b = Bench("ab", 100, preload=True, ttl=0.01)
        await b.manager.preload()
        assert b.loaded() == "ab"
        gate = asyncio.Event()
        busy = asyncio.ensure_future(b.use("a", gate.wait()))
        watcher = asyncio.ensure_future(b.manager.watch_ttl())
        while b.loaded() != "a":
            await asyncio.sleep(0.02)
        gate.set()
        await busy
        while b.loaded():
            await asyncio.sleep(0.02)
        watcher.cancel()
        await b.manager.close()

    run(work)


def test_a_request_says_how_long_its_model_stays() -> None:
    async def work() -> None:
        b = Bench("ab", 100, ttl=0.01)
        await b.manager.load("a")
        b.manager.keep("a", -1)
        await b.manager.load("b")
        watcher = asyncio.ensure_future(b.manager.watch_ttl())
        while b.loaded() != "a":
            await asyncio.sleep(0.02)
        b.manager.keep("a", 0)
        while b.loaded():
            await asyncio.sleep(0.02)
        watcher.cancel()
        await b.manager.close()

    run(work)


def test_closing_ends_what_loads_and_refuses_what_comes() -> None:
    async def work() -> None:
        b = Bench("ab", 100)
        await b.use("b")
        waiting = asyncio.ensure_future(b.use("a"))
        await asyncio.sleep(0.005)
        await b.manager.close()
        assert sorted(b.journal) == ["+a", "+b", "-a", "-b"] and all(
            one.child is None for one in b.manager.instances.values()
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
        await b.manager.close()

    run(work)
