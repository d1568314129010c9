"""Thinking of the model as requests and options want it: ended early, with an effort, kept or dropped, left unread."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine, Script, fake_tokenizer
from proxies import run
from server_client import Client, parse_events
from test_server_http import error_of

from ikcli.errors import UsageError
from ikcli.server.http.budget import ReasoningBudget, ReasoningControl
from ikcli.server.http.chat import check_options

HI = [{"role": "user", "content": "hi"}]
EFFORTS = "{{ messages[-1].content }}|{{ reasoning_effort }}|{{ reasoning_strength }}|{{ enable_thinking }}"
KEEPS = """{% for m in messages %}[{{ m.content }}{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}]
{%- endfor %} {{ preserve_thinking }} {{ clear_thinking }}"""
TALK = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "t1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2", "reasoning_content": "t2"},
    {"role": "tool", "content": "r"},
]


class Stream:
    """A request whose answer is read while it comes."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._body: bytes | None = json.dumps(body | {"stream": True}).encode()
        self._gone = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
        self._task = asyncio.ensure_future(app(scope, self._receive, self._sent.put))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def events(self) -> list[Any]:
        """Those of the next chunk."""
        while (message := await self._sent.get())["type"] == "http.response.start":
            assert message["status"] == 200
        return list(parse_events(message["body"].decode()))

    async def leave(self) -> None:
        """Go away."""
        self._gone.set()
        await self._task


def allowed(budget: ReasoningBudget, n_vocab: int) -> list[int]:
    """The tokens that may follow, none if all may."""
    mask = budget.mask()
    return [] if mask is None else [i for i in range(n_vocab) if np.uint32(mask[i // 32]) >> np.uint32(i % 32) & 1]


def forced(budget: ReasoningBudget, tokenizer: Any) -> str:
    """The text that has to come."""
    out = []
    while found := allowed(budget, tokenizer.n_vocab):
        assert len(found) == 1
        out += found
        budget.accept(found[0])
    return str(tokenizer.decode(out))


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [("/v1/chat/completions", {"messages": HI}, "chatcmpl-"), ("/v1/responses", {"input": "hi"}, "resp_"),
     ("/v1/messages", {"messages": HI}, "msg_")],
)  # fmt: skip
def test_thinking_of_a_running_answer_is_ended(path: str, body: dict[str, Any], prefix: str) -> None:
    client = Client(reasoning_budget_message="Enough.")
    tokenizer = client.engine.tokenizer
    client.engine.script = Script(pieces=("a",), endless=True, delay=0.002)

    async def work() -> None:
        app = client.app()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as other:

            async def end(id: str) -> dict[str, Any]:
                answer = await other.post("/v1/chat/completions/control", json={"id": id, "action": "reasoning_end"})
                assert answer.status_code == 200
                return dict(answer.json())

            stream = Stream(app, path, body | {"reasoning_control": True})
            first = (await stream.events())[0]
            id = first.get("id") or first.get("response", first.get("message", {}))["id"]
            assert id.startswith(prefix)
            make = client.engine.requests[-1].constraint
            assert make is not None
            thinks, answers, late = make(), make(), make()
            for token in tokenizer.encode("<think>ab", add_special=False):
                thinks.accept(token)
            for token in tokenizer.encode("An answer", add_special=False):
                answers.accept(token)
            assert thinks.mask() is None
            assert (await end("chatcmpl-other"))["success"] is False
            assert await end(id) == {"success": True}
            assert forced(thinks, tokenizer) == "Enough.</think>" and thinks.mask() is None
            assert answers.mask() is None
            for token in tokenizer.encode("<think>", add_special=False):
                assert late.mask() is None
                late.accept(token)
            assert forced(late, tokenizer) == "Enough.</think>"
            await stream.leave()
            assert "no answer with this id" in (await end(id))["message"]
            stream = Stream(app, path, body)
            first = (await stream.events())[0]
            assert client.engine.requests[-1].constraint is None
            id = first.get("id") or first.get("response", first.get("message", {}))["id"]
            assert "reasoning_control" in (await end(id))["message"]
            await stream.leave()

    run(work)


def test_mistakes_about_control() -> None:
    client = Client()
    for path in ("/v1/chat/completions/control", "/chat/completions/control"):
        for body in ({}, {"action": "reasoning_end"}, {"id": 5, "action": "reasoning_end"}):
            assert "id" in error_of(client.post(path, body), 400)
        for action in (None, "stop", 3):
            assert "reasoning_end" in error_of(client.post(path, {"id": "x", "action": action}), 400)
    wrong = {"messages": HI, "reasoning_control": "yes"}
    assert "reasoning_control" in error_of(client.post("/v1/chat/completions", wrong), 400)
    client.post("/v1/chat/completions", {"messages": HI, "reasoning_control": True})
    state = client.state()
    assert state.running.end_thinking("x")  # answers that are over are forgotten


def test_nothing_is_forced_within_a_character() -> None:
    tokenizer = fake_tokenizer()
    control = ReasoningControl()
    budget = ReasoningBudget(None, tokenizer, open="<think>", close="</think>", budget=-1, opened=True, control=control)
    first, second = tokenizer.encode("ö", add_special=False)
    budget.accept(first)
    control.end()
    assert budget.mask() is None
    budget.accept(second)
    assert forced(budget, tokenizer) == "</think>"
    spent = ReasoningBudget(None, tokenizer, open="<think>", close="</think>", budget=1, opened=True)
    spent.accept(first)
    assert spent.mask() is None
    spent.accept(second)
    assert forced(spent, tokenizer) == "</think>"


def prompt(client: Client, **fields: Any) -> str:
    return str(client.post("/apply-template", {"messages": HI, **fields}).json()["prompt"])


def test_effort() -> None:
    client = Client(chat_template=EFFORTS)
    assert prompt(client) == "hi|||True"
    assert prompt(client, reasoning_effort="high") == "hi|high|high|True"
    assert prompt(client, reasoning_effort="none") == "hi|||False"
    assert prompt(client, reasoning_effort="default") == "hi|||True"
    own = {"reasoning_effort": "low"}
    assert prompt(client, reasoning_effort="high", chat_template_kwargs=own) == "hi|low|low|True"
    other = {"reasoning_strength": "x"}
    assert prompt(client, reasoning_effort="high", chat_template_kwargs=other) == "hi|high|x|True"
    error_of(client.post("/apply-template", {"messages": HI, "reasoning_effort": "two words"}), 400)
    caps = client.get("/props").json()["chat_template_caps"]
    assert caps["supports_reasoning_effort"] and not caps["supports_preserve_reasoning"]


def test_effort_of_the_server() -> None:
    client = Client(
        chat_template=EFFORTS, reasoning_effort="medium", chat_template_kwargs='{"reasoning_effort": "max"}'
    )
    assert prompt(client) == "hi|medium|medium|True"
    assert prompt(client, reasoning_effort="high") == "hi|high|high|True"
    assert prompt(client, reasoning_effort="default") == "hi|||True"
    off = Client(chat_template=EFFORTS, reasoning_effort="none")
    assert prompt(off) == "hi|||False"
    assert prompt(off, chat_template_kwargs={"enable_thinking": True}) == "hi|||True"
    with pytest.raises(UsageError, match="--reasoning-effort very much"):
        check_options(Client(reasoning_effort="very much").config)


def test_effort_of_other_apis() -> None:
    client = Client(chat_template=EFFORTS)

    def sent(path: str, body: dict[str, Any]) -> str:
        assert client.post(path, body).status_code == 200
        return client.engine.tokenizer.decode(client.engine.requests[-1].prompt).removeprefix("<|bos|>")

    assert sent("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}) == "hi|low|low|True"
    assert sent("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}}) == "hi|||False"
    assert sent("/v1/messages", {"messages": HI, "output_config": {"effort": "max"}}) == "hi|max|max|True"
    assert sent("/v1/messages", {"messages": HI, "thinking": {"type": "disabled"}}) == "hi|||False"
    own = {"messages": HI, "thinking": {"type": "disabled"}, "chat_template_kwargs": {"reasoning_effort": "x"}}
    assert sent("/v1/messages", own) == "hi|x|x|False"
    client = Client(chat_template=EFFORTS, reasoning="off")
    assert sent("/v1/messages", {"messages": HI}) == "hi|||False"
    assert sent("/v1/messages", {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 9}}) == "hi|||True"


def test_thoughts_of_earlier_turns() -> None:
    def shown(client: Client, **fields: Any) -> str:
        return str(client.post("/apply-template", {"messages": TALK, **fields}).json()["prompt"])

    plain = Client(chat_template=KEEPS)
    assert shown(plain) == "[q1][a1 (t1)][q2][a2 (t2)][r]  "
    assert shown(Client(chat_template=KEEPS, reasoning_preserve=True)) == "[q1][a1 (t1)][q2][a2 (t2)][r] True False"
    dropped = Client(chat_template=KEEPS, reasoning_preserve=False)
    assert shown(dropped) == "[q1][a1][q2][a2 (t2)][r] False True"
    kept = shown(dropped, chat_template_kwargs={"preserve_reasoning": True})
    assert kept == "[q1][a1 (t1)][q2][a2 (t2)][r] True False"
    wrong = {"messages": TALK, "chat_template_kwargs": {"preserve_reasoning": "no"}}
    assert "preserve_reasoning" in error_of(plain.post("/apply-template", wrong), 400)
    assert plain.get("/props").json()["chat_template_caps"]["supports_preserve_reasoning"]


def test_answers_that_are_not_read() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = '<think> so\n</think>\n\nYes <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    template = "{{ messages[0].content }}{% if tools %}{{ tools|tojson }}{% endif %}<tool_call><think>"
    for skip in (True, False):
        client = Client(chat_template=template, skip_chat_parsing=skip, engine=FakeEngine(fake_tokenizer(), n_ctx=2048))
        client.engine.script = Script(pieces=tuple(text))
        message = client.post("/v1/chat/completions", {"messages": HI, "tools": [tool]}).json()["choices"][0]["message"]
        assert (message == {"role": "assistant", "content": text}) is skip, message
        events = client.events("/v1/chat/completions", {"messages": HI, "tools": [tool]})
        deltas = [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]
        assert ("".join(delta.get("content") or "" for delta in deltas) == text) is skip


def test_tokens_of_a_conversation() -> None:
    client = Client()
    n = len(client.engine.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert client.post(path, {"messages": HI}).json() == {"object": "response.input_tokens", "input_tokens": n}
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        assert client.post(path, {"input": "hi"}).json() == {"object": "response.input_tokens", "input_tokens": n}
        error_of(client.post(path, {}), 400)
    assert not client.engine.requests
