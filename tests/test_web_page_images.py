"""Images in the web page: dropped, pasted, picked, kept, and refused."""

# ruff: noqa: F811  (tests name the fixtures they take)

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import Script
from test_server_images import FakePicture
from web_pages import OpenPage, Slow, answers, reload, send

from web_pages import browser, open_page, server, slow  # isort: skip  # noqa: F401  (fixtures)

from ikcli.errors import IkError

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Pixels:
    """A projector for which every PNG file has 5 tokens."""

    def read(self, data: bytes) -> list[FakePicture]:
        if not data.startswith(b"\x89PNG"):
            raise IkError("this is not an image")
        return [FakePicture(str(len(data)), 5)]


@pytest.fixture(scope="module")
def seeing(browser: Any) -> Iterator[Slow]:
    found = Slow(Script(("a red ", "ball")))
    found.engine.pictures = Pixels()
    yield found
    found.stop()


_FILES = """
([text, names]) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const found = new DataTransfer();
  names.forEach((name) => found.items.add(new File([bytes], name, { type: "image/png" })));
  return found;
}
"""


@pytest.mark.slow  # a page in a browser
def test_images_are_dropped_pasted_and_picked(open_page: OpenPage, seeing: Slow) -> None:
    from playwright.sync_api import expect

    page = open_page({}, base=seeing.base)
    previews = page.locator("#attachments img")
    page.wait_for_selector("#attach:visible")
    for event in ("dragover", "drop"):
        page.dispatch_event("#messages", event, {"dataTransfer": page.evaluate_handle(_FILES, [PNG, ["a.png"]])})
    expect(previews).to_have_count(1)
    page.evaluate(
        f"(files) => document.getElementById('input').dispatchEvent(new ClipboardEvent('paste', "
        f"{{ clipboardData: ({_FILES})(files), bubbles: true, cancelable: true }}))", [PNG, ["b.png"]],
    )  # fmt: skip
    expect(previews).to_have_count(2)
    page.set_input_files("#image-file", {"name": "c.png", "mimeType": "image/png", "buffer": base64.b64decode(PNG)})
    expect(previews).to_have_count(3)
    page.click("[aria-label='Remove image 2']")
    expect(previews).to_have_count(2)
    send(page, "What is it?")
    assert answers(page, 1) == ["a red ball"]
    expect(previews).to_have_count(0)
    request = seeing.engine.requests[-1]
    assert [placed.picture.n_tokens for placed in request.pictures] == [5, 5]
    assert "What is it?" in seeing.engine.tokenizer.decode([token for token in request.prompt if token >= 0])
    # the conversation keeps them, and the next turn sends them again
    reload(page)
    expect(page.locator(".message.user .pictures img")).to_have_count(2)
    send(page, "And now?")
    answers(page, 2)
    assert len(seeing.engine.requests[-1].pictures) == 2


@pytest.mark.slow  # a page in a browser
def test_a_broken_image_and_a_model_without_a_projector(open_page: OpenPage, seeing: Slow, slow: Slow) -> None:
    page = open_page({}, base=seeing.base)
    page.wait_for_selector("#attach:visible")
    page.set_input_files("#image-file", {"name": "c.png", "mimeType": "image/png", "buffer": b"no pixels"})
    send(page, "")
    page.wait_for_selector(".assistant .error >> text=Messages[0].content[0]: this is not an image")
    page.set_input_files("#image-file", {"name": "c.txt", "mimeType": "text/plain", "buffer": b"text"})
    page.wait_for_selector("#banner >> text=c.txt is not an image.")
    blind = open_page({}, base=slow.base)
    blind.dispatch_event("#messages", "drop", {"dataTransfer": blind.evaluate_handle(_FILES, [PNG, ["a.png"]])})
    blind.wait_for_selector("#banner >> text=This model reads text only.")
    assert not blind.is_visible("#attach")


def _hold_props(page: Any) -> list[Any]:
    """Return a list that gets the requests for what the server runs, which wait there."""
    held: list[Any] = []
    page.route("**/props", lambda route: held.append(route))
    return held


@pytest.mark.slow  # a page in a browser
def test_images_dropped_before_the_server_has_answered(open_page: OpenPage, seeing: Slow, slow: Slow) -> None:
    from playwright.sync_api import expect

    for base in (seeing.base, slow.base):
        page = open_page({}, base=base)
        held = _hold_props(page)
        reload(page)
        page.dispatch_event("#messages", "drop", {"dataTransfer": page.evaluate_handle(_FILES, [PNG, ["a.png"]])})
        expect(page.locator("#banner")).to_be_hidden()
        held[0].continue_()
        if base == seeing.base:
            expect(page.locator("#attachments img")).to_have_count(1)
        else:
            page.wait_for_selector("#banner >> text=This model reads text only.")
