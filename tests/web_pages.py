"""The web page of a server in a headless browser: fixtures and what users do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fake_engine import FakeEngine, Script, fake_tokenizer
from headless import MS, chromium
from server_client import Client
from test_server_live import WAIT, Server, wait_for

KEY = "key-of-the-test"
SHORT = {"max_tokens": "12", "seed": "1", "extra": '{"ignore_eos": true}'}


class Slow:
    """A server that answers slowly and never comes to an end, so that there is something to stop."""

    def __init__(self, script: Script | None = None) -> None:
        self.engine = FakeEngine(fake_tokenizer(), n_ctx=4096)
        self.engine.script = script or Script(("slow ", "answer "), endless=True, delay=0.02)
        self._socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(Client(engine=self.engine, ui=True).app, factory=True, lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        self.base = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT)
        self._socket.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("page") / "log"
    found = Server("-c", "512", "--api-key", KEY, log=log)
    wait_for(lambda: '"loading model"' not in found.text() and found.get("/health").status_code == 200)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def slow(browser: Any) -> Iterator[Slow]:
    found = Slow()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(server: Server, browser: Any) -> Iterator[OpenPage]:
    """Opens the page in a fresh profile; the test fails if the page reports an error."""
    contexts: list[Any] = []
    errors: list[str] = []

    def make(settings: dict[str, str] | None = None, key: str = KEY, base: str = "", **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1000, "height": 700}} | options))
        contexts.append(context)
        context.set_default_timeout(MS)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: note(message))
        page.goto(base or server.base)
        page.evaluate(
            "text => localStorage.setItem('ik.settings', text)", json.dumps(SHORT if settings is None else settings)
        )
        page.evaluate("key => sessionStorage.setItem('ik.key', key)", key)
        return reload(page)

    def note(message: Any) -> None:
        # a browser reports every answer above 399 by itself; those are what some tests are about
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            errors.append(message.text)

    yield make
    for context in contexts:
        context.close()
    assert not errors


def reload(page: Any) -> Any:
    page.reload()
    page.wait_for_selector("body[data-ready]")
    return page


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.click("#send")


def answers(page: Any, n: int) -> list[str]:
    """The texts of `n` finished answers."""
    from playwright.sync_api import expect

    expect(page.locator(".message.assistant:not(.running)")).to_have_count(n)
    return [str(text) for text in page.locator(".message.assistant .markdown").all_inner_texts()]


def answer_with(page: Any, *chunks: dict[str, Any], done: bool = True, status: int = 200) -> list[dict[str, Any]]:
    """Chat requests of the page get this stream; returns the list their bodies are added to."""
    bodies: list[dict[str, Any]] = []
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n" * done

    def handle(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(status=status, content_type="text/event-stream" if status == 200 else "application/json",
                      body=text if status == 200 else json.dumps(chunks[0]))  # fmt: skip

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", handle)
    return bodies


def chunk(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
