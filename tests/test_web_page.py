"""The web page of the server in a headless browser, with the demo model behind it."""

# ruff: noqa: F811  (tests name the fixtures they take)

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from fake_engine import Script
from markdown_cases import MARKDOWN, RENDER
from test_server_live import WAIT, wait_for
from web_pages import KEY, SHORT, OpenPage, Slow, answer_with, answers, chunk, reload, send

from web_pages import browser, open_page, server, slow  # isort: skip  # noqa: F401  (fixtures)


def test_answer_is_streamed(open_page: OpenPage) -> None:
    from playwright.sync_api import expect

    page = open_page(SHORT | {"max_tokens": "200", "extra": '{"ignore_eos": true}'})
    expect(page.locator("#model")).to_have_text(re.compile("^demo"))
    assert page.inner_text("#context-text") == "0 / 512 tokens"
    page.evaluate(
        "() => { window.seen = new Set(); new MutationObserver(() => window.seen.add("
        "document.querySelector('.assistant .markdown')?.textContent)).observe(document.getElementById('messages'),"
        "{ subtree: true, childList: true, characterData: true }); }"
    )
    send(page, "The history of the language")
    (text,) = answers(page, 1)
    seen = page.evaluate("() => [...window.seen].filter(Boolean)")
    assert text and len(seen) > 1 and any(0 < len(part) < len(seen[-1]) for part in seen)
    stats = page.inner_text(".assistant .stats")
    assert re.match(r"cut off at the token limit · 200 tokens · [\d.]+ tokens/s · prompt \d+ tokens, ", stats)
    assert re.fullmatch(r"[\d.]+ tokens/s", page.inner_text("#speed"))
    assert int(page.inner_text("#context-text").split()[0]) > 200
    assert page.inner_text("#title") == "The history of the language"
    assert page.inner_text("#status") == "The answer is complete"


@pytest.mark.slow  # a page in a browser
def test_stop(open_page: OpenPage, slow: Slow) -> None:
    page = open_page({}, base=slow.base)
    for press in (lambda: page.keyboard.press("Escape"), lambda: page.click("#stop")):
        send(page, "Go on")
        page.wait_for_selector(".assistant.running >> text=slow answer")
        press()
        page.wait_for_selector(".assistant:not(.running) .stats")
        page.wait_for_selector("#send:visible")
        assert "stopped" in page.locator(".assistant .stats").last.inner_text()
        wait_for(slow.engine.tickets[-1].cancelled.is_set)
    assert all(text.startswith("slow answer") for text in answers(page, 2))
    send(page, "Go on")
    page.wait_for_selector(".assistant.running .markdown > *")
    slow_answer = page.locator(".assistant").last.get_attribute("data-id")
    page.click("#new")
    page.click("#conversations .open")
    page.wait_for_selector(f".running[data-id='{slow_answer}']")
    page.locator("[aria-label='Answer again']").first.click()
    page.wait_for_selector(".running >> text=slow answer")
    assert page.locator(".assistant").count() == 1
    wait_for(slow.engine.tickets[2].cancelled.is_set)
    assert not slow.engine.tickets[3].cancelled.is_set()
    reload(page)
    wait_for(slow.engine.tickets[3].cancelled.is_set)
    answers(page, 1)
    assert page.inner_text(".assistant .stats").startswith("stopped")


@pytest.mark.slow  # a page in a browser
def test_regenerate_edit_and_versions(open_page: OpenPage) -> None:
    page = open_page()
    bodies = answer_with(page, chunk(content="one"))
    send(page, "first question")
    answers(page, 1)
    answer_with(page, chunk(content="two"))
    page.click("[aria-label='Answer again']")
    page.wait_for_selector("text=2/2")
    assert answers(page, 1) == ["two"]
    page.click("[aria-label='Version before']")
    assert answers(page, 1) == ["one"]
    bodies = answer_with(page, chunk(content="three"))
    page.click(".user [aria-label='Edit the message']")
    page.fill("[aria-label='Edit the message']:focus", "second question")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=three")
    assert bodies[0]["messages"] == [{"role": "user", "content": "second question"}]
    page.click(".assistant [aria-label='Edit the message']")
    page.keyboard.type("not kept")
    page.keyboard.press("Escape")
    page.click(".assistant [aria-label='Edit the message']")
    page.fill("textarea[aria-label='Edit the message']", "changed by hand")
    page.click("text=Save >> visible=true")
    send(page, "next")
    answers(page, 2)
    sent = [(m["role"], m["content"]) for m in bodies[1]["messages"]]
    assert sent == [("user", "second question"), ("assistant", "changed by hand"), ("user", "next")]
    page.click(".user [aria-label='Version before']")
    page.wait_for_selector("text=first question")
    assert answers(page, 1) == ["two"]


@pytest.mark.slow  # a page in a browser
def test_conversations_are_kept(open_page: OpenPage, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    page = open_page()
    answer_with(page, chunk(content="alpha"), {"choices": [], "timings": {"n_past": 77, "n_ctx": 512}})
    send(page, "one")
    answers(page, 1)
    page.click("#new")
    page.click("#system-box summary")
    page.fill("#system", "Be brief.")
    bodies = answer_with(page, chunk(content="beta"))
    send(page, "two")
    answers(page, 1)
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    reload(page)
    assert answers(page, 1) == ["beta"]
    page.click("#conversations .open >> text=one")
    assert answers(page, 1) == ["alpha"]
    assert page.inner_text("#context-text") == "77 / 512 tokens"
    page.click("[aria-label='Rename “one”']")
    page.fill("#ask-input", "A <b>name</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Delete “A <b>name</b>”']")
    with page.expect_download() as download:
        page.click("#export-all")
    path = tmp_path / "all.json"
    download.value.save_as(path)
    assert KEY not in path.read_text() and len(json.loads(path.read_text())["conversations"]) == 2
    page.click("[aria-label='Delete “A <b>name</b>”']")
    page.click("#ask-yes")
    expect(page.locator("#conversations li")).to_have_count(1)
    reload(page)
    expect(page.locator("#conversations li")).to_have_count(1)
    page.set_input_files("#import-file", path)
    expect(page.locator("#conversations li")).to_have_count(3)
    for text in ("{", "[]", '{"format":"ik-conversations","version":1,"conversations":[{"nodes":{"a":{"role":"x"}}}]}',
                 '{"format":"ik-conversations","version":1,"conversations":'
                 '[{"nodes":{"a":{"role":"user","parent":"a"}}}]}'):  # fmt: skip
        path.write_text(text)
        page.set_input_files("#import-file", path)
        page.wait_for_selector("#banner:has-text('Import: ')")
        expect(page.locator("#conversations li")).to_have_count(3)
        page.evaluate("() => document.getElementById('banner').replaceChildren()")


HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>

<svg onload=window.hacked=1> <iframe src="javascript:window.hacked=1"></iframe>

[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) [c](data:text/html,x) [d](java\tscript:x) <javascript:x>
[e](//example.org) [f](file:///etc/passwd) ![g](javascript:x) ![h](http://example.org/h.png "t") [i](vbscript:x)
[ok](https://example.org/"onmouseover="x) <https://example.org/<b>

- `<b onclick=x>` **<i>x</i>**

| <u>a</u> | b |
|---|---|
| <img src=x onerror=window.hacked=1> | [x](javascript:x) |

```<img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked=1</script>
```
"""


def test_injected_html_stays_text(open_page: OpenPage) -> None:
    page = open_page()
    calls = [{"index": 0, "id": "c", "function": {"name": HOSTILE, "arguments": HOSTILE}}]
    answer_with(page, chunk(reasoning_content=HOSTILE), chunk(content=HOSTILE), chunk(tool_calls=calls))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    send(page, HOSTILE)
    answers(page, 1)
    page.click(".reasoning summary")
    page.click("[aria-label^='Rename']")
    page.fill("#ask-input", HOSTILE)
    page.keyboard.press("Enter")
    reload(page)
    assert page.evaluate("() => window.hacked") is None
    messages = page.locator("#messages")
    assert messages.locator("img, script, iframe, svg:not(button svg), b, i, u").count() == 0
    attributes = "all => all.flatMap(e => [...e.attributes]).filter(a => /^on|^style$/.test(a.name)).map(a => a.name)"
    assert messages.locator("*").evaluate_all(attributes) == []
    links = "all => all.map(a => [a.protocol, a.rel, a.target])"
    found = messages.locator("a").evaluate_all(links)
    assert found and all(link[0] in ("http:", "https:") for link in found)
    assert all(link[1:] == ["noopener noreferrer nofollow", "_blank"] for link in found)
    assert not [url for url in requests if not url.startswith((page.url, "blob:"))]


def test_markdown(open_page: OpenPage) -> None:
    page = open_page()
    texts = [text for text, _ in MARKDOWN]
    assert page.evaluate(RENDER, [texts, 0]) == [expected for _, expected in MARKDOWN]
    whole = "\n\n".join(texts)
    assert page.evaluate(RENDER, [[whole], 7]) == page.evaluate(RENDER, [[whole], 0])


@pytest.mark.slow  # a page in a browser
def test_markdown_of_odd_texts_is_quick(open_page: OpenPage) -> None:
    """Text that makes a careless parser look ahead again and again, or go deeper and deeper."""
    page = open_page()
    units = (
        "*a ",
        "**a ",
        "~~a ",
        "_a",
        "[",
        "[a](",
        ">",
        "- ",
        "`",
        "` `` ",
        "#",
        "|",
        "<",
        "&",
        "http://",
        " ",
        "1. ",
    )
    texts = [unit * 30000 + end for unit in units for end in ("", "x")]
    texts += ["\n".join("  " * i + "- x" for i in range(400)), "```js\n" + '"\\' * 30000, "> " * 500 + "x"]
    begun = time.monotonic()
    page.evaluate(RENDER, [texts, 0])
    assert time.monotonic() - begun < WAIT


@pytest.mark.slow  # a page in a browser
def test_settings_are_sent(open_page: OpenPage) -> None:
    page = open_page({})
    bodies = answer_with(page, chunk(content="x"))
    send(page, "a")
    answers(page, 1)
    flags = dict.fromkeys(("stream", "timings_per_token", "return_progress", "reasoning_control"), True)
    messages = [{"role": "user", "content": "a"}]
    assert bodies[0] == flags | {"messages": messages, "stream_options": {"include_usage": True}}
    page.click("#settings-open")
    assert page.get_attribute("#set-temperature", "placeholder") == "0.8"
    page.fill("#set-temperature", "0.25")
    page.fill("#set-top_k", "7")
    page.fill("#set-max_tokens", "-5")
    page.select_option("#set-reasoning", "off")
    page.click("summary >> text=Penalties")
    page.click("summary >> text=/^More$/")
    page.fill("#set-repeat_penalty", "1.1")
    page.fill("#set-stop", "END\nSTOP")
    page.fill("#set-extra", '{"tools": []')
    page.click("text=Save >> visible=true")
    assert page.inner_text("#settings-error").startswith("Most tokens per answer: at least -1")
    page.fill("#set-max_tokens", "9")
    page.keyboard.press("Enter")
    assert page.inner_text("#settings-error").startswith("More request fields: ")
    page.fill("#set-extra", '{"logit_bias": [[1, false]], "chat_template_kwargs": {"a": 1}}')
    page.click("text=Save >> visible=true")
    reload(page)
    send(page, "b")
    answers(page, 2)
    expected = {"temperature": 0.25, "top_k": 7, "max_tokens": 9, "repeat_penalty": 1.1, "stop": ["END", "STOP"]}
    expected |= {"logit_bias": [[1, False]], "chat_template_kwargs": {"enable_thinking": False, "a": 1}}
    assert {name: bodies[1].get(name) for name in expected} == expected
    page.unroute("**/v1/chat/completions")
    send(page, "the real server takes all of them")
    answers(page, 3)
    assert page.locator(".message .error:visible").count() == 0


@pytest.mark.slow  # a page in a browser
def test_settings_that_the_server_names(open_page: OpenPage) -> None:
    """They are used and shown, the user's count more, and an empty field can take the place of one."""
    from playwright.sync_api import expect

    page = open_page({"top_k": "3"})
    preset = {"temperature": 0.5, "top_k": 9, "min_p": 0.1, "system": "Be brief.", "reasoning": "off"}
    page.route("**/ui-config.json", lambda route: route.fulfill(json=preset))
    reload(page)
    expect(page.locator("#system")).to_have_value("Be brief.")  # wait_for_function polls by eval: forbidden
    bodies = answer_with(page, chunk(content="x"))
    page.click("#settings-open")
    assert [page.input_value(f"#set-{name}") for name in ("temperature", "top_k", "reasoning")] == ["0.5", "3", "off"]
    page.fill("#set-min_p", "")
    page.click("text=Save >> visible=true")
    assert json.loads(page.evaluate("localStorage.getItem('ik.settings')")) == {"top_k": "3", "min_p": ""}
    send(page, "a")
    answers(page, 1)
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (bodies[0]["temperature"], bodies[0]["top_k"], "min_p" in bodies[0]) == (0.5, 3, False)
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.slow  # a page in a browser
def test_reasoning_is_cut_short(open_page: OpenPage) -> None:
    server = Slow()
    server.engine.script = Script(("<think>", "hm "), endless=True, delay=0.02)
    try:
        page = open_page({}, base=server.base)
        send(page, "Think")
        page.click("text=Answer now")
        constraint = server.engine.requests[-1].constraint()
        for token in server.engine.tokenizer.encode("<think>", add_special=False):
            constraint.accept(token)
        wait_for(lambda: constraint.mask() is not None)
        page.click("#stop")
        answers(page, 1)
        assert not page.locator("text=Answer now").is_visible()
    finally:
        server.stop()


def test_reasoning_and_tool_calls(open_page: OpenPage) -> None:
    page = open_page()
    calls = [
        chunk(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"city":'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '"Oslo"}'}}]),
    ]
    bodies = answer_with(page, chunk(reasoning_content="I *think*"), *calls, chunk("tool_calls"))
    send(page, "weather?")
    answers(page, 1)
    assert not page.locator(".reasoning em").is_visible()
    page.click(".reasoning summary")
    assert page.inner_text(".reasoning em") == "think"
    assert page.inner_text(".call p") == "Calls get_weather"
    assert page.inner_text(".call pre") == '{\n  "city": "Oslo"\n}'
    page.fill(".calls textarea", "rain")
    bodies = answer_with(page, chunk(content="It rains."))
    page.click("text=Send the result")
    page.wait_for_selector("text=It rains.")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    assert bodies[0]["messages"][1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "I *think*", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert page.locator(".calls form").count() == 0


@pytest.mark.slow  # a page in a browser
def test_errors_are_shown(open_page: OpenPage) -> None:
    from playwright.sync_api import expect

    page = open_page()
    error = page.locator(".assistant .error").last
    send(page, "word " * 1500)
    expect(error).to_contain_text("but the context holds 512")
    answer_with(
        page, {"error": {"code": 400, "message": "top_k must be small", "type": "invalid_request_error"}}, status=400
    )
    send(page, "a")
    expect(error).to_have_text("Top_k must be small")
    bodies = answer_with(
        page, chunk(content="half an"), {"error": {"code": 500, "message": "out of luck", "type": "x"}}
    )
    page.locator("[aria-label='Answer again']").last.click()
    expect(error).to_have_text("Out of luck")
    answer_with(page, chunk(content="half an"), done=False)
    send(page, "b")
    expect(error).to_contain_text("ended before the answer was complete")
    assert answers(page, 3)[2] == "half an"
    # questions without an answer are sent as one
    assert [m["role"] for m in bodies[0]["messages"]] == ["user"]
    page.route("**/health", lambda route: route.abort())
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "c")
    expect(error).to_contain_text("does not answer")
    page.unroute("**/health")


@pytest.mark.slow  # a page in a browser
def test_key_is_asked_for(open_page: OpenPage) -> None:
    page = open_page(key="wrong")
    page.click("#banner button")
    assert page.evaluate("() => document.activeElement.id") == "set-key"
    page.keyboard.press("Control+A")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#banner", state="hidden")
    assert page.inner_text("#model").startswith("demo")
    assert page.evaluate("() => localStorage.getItem('ik.key')") is None
    send(page, "a")
    assert answers(page, 1)[0]


@pytest.mark.slow  # a page in a browser
def test_keyboard_only(open_page: OpenPage, slow: Slow) -> None:
    page = open_page({}, base=slow.base)
    focused = "() => document.activeElement.id || document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "input"
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant.running .markdown > *")
    assert page.inner_text(".user .body") == "line one\nline two"
    page.keyboard.press("Escape")
    page.wait_for_selector(".assistant:not(.running)")
    assert page.evaluate(focused) == "input"
    page.keyboard.press("Shift+Tab")
    for name in ("Answer again", "Edit the message", "Copy the message"):
        assert page.evaluate(focused) == name
        page.keyboard.press("Shift+Tab")
    page.focus(".skip")
    assert page.inner_text(".skip:focus") == "Skip to the message field"
    order = []
    for _ in range(3):
        page.keyboard.press("Tab")
        order.append(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
    assert order == ["new", "open", "icon"]
    page.focus("#settings-open")
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#settings", state="hidden")
    assert page.evaluate(focused) == "settings-open"
    unnamed = (
        "all => all.filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert page.locator("button, input, textarea, select").evaluate_all(unnamed) == []


WIDE = (
    "# " + "w" * 300 + "\n\n`" + "c" * 200 + "`\n\n```\n" + "x" * 300 + "\n```\n\n|a|b|\n|-|-|\n|" + "y" * 200 + "|z|\n"
)


@pytest.mark.slow  # a page in a browser
def test_phone(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    answer_with(page, chunk(reasoning_content=WIDE), chunk(content=WIDE))
    send(page, "u" * 300)
    answers(page, 1)
    page.click(".reasoning summary")
    outside = "all => all.filter(e => e.getBoundingClientRect().right > 360.5 && !e.closest('pre, .table')).length"

    def fits() -> bool:
        widths = page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
        return widths == [360, 360] and page.locator("body *:visible").evaluate_all(outside) == 0

    assert fits()
    page.click(".user [aria-label='Edit the message']")
    assert fits()
    page.click("#menu")
    page.wait_for_selector("#sidebar:visible")
    assert fits() and page.evaluate("() => document.querySelector('main').inert")
    page.keyboard.press("Escape")
    page.wait_for_selector("#sidebar", state="hidden")
    page.click("#settings-open")
    assert fits()
    page.click("#settings-cancel")
    page.fill("#input", "a")
    page.focus("#input")
    page.keyboard.press("Enter")
    assert page.input_value("#input") == "a\n"


@pytest.mark.slow  # a page in a browser
def test_dark_and_light(open_page: OpenPage) -> None:
    page = open_page(color_scheme="dark")
    colours = "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; }"

    def bright() -> list[bool]:
        return [sum(map(int, re.findall(r"\d+", text)[:3])) > 384 for text in page.evaluate(colours)]

    assert bright() == [False, True]
    page.click("#theme")
    assert bright() == [True, False]
    reload(page)
    assert bright() == [True, False] and page.get_attribute("#theme", "aria-label") == "Colours: light"
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert bright() == [False, True]
    page.click("#theme")
    assert bright() == [True, False]
