"""Ollama's API: the shapes that its clients read, with a fake engine behind the application."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Script, fake_tokenizer
from server_client import Client
from test_server_chat import HERMES, WEATHER, calling

from ikcli.server.http.dialects import ollama as convert
from ikcli.server.http.errors import ApiError
from ikcli.server.slots.messages import Failure

TEXT = "Hello, wörld!"
HI = [{"role": "user", "content": "hi"}]
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
COUNTS = {"prompt_eval_count", "eval_count"}
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if enable_thinking %}<think>\n{% endif %}"
)


def error_of(response: Any, status: int) -> str:
    """The sentence of an error in Ollama's form."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"} and isinstance(response.json()["error"], str)
    return str(response.json()["error"])


def lines(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    response = client.post(path, {"model": "m"} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson" and response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat() -> None:
    client = Client()
    body = client.post("/api/chat", {"model": "m:latest", "messages": HI, "stream": False}).json()
    assert set(body) == {"model", "created_at", "message", "done", "done_reason"} | DURATIONS | COUNTS
    assert body["model"] == "m:latest" and STAMP.fullmatch(body["created_at"])
    assert body["message"] == {"role": "assistant", "content": TEXT}
    assert body["done"] is True and body["done_reason"] == "stop"
    assert body["eval_count"] == 4 and body["eval_duration"] == 4_000_000 and body["prompt_eval_duration"] == 2_000_000
    assert body["prompt_eval_count"] == len(client.engine.requests[-1].prompt)
    assert body["total_duration"] > 0 and all(isinstance(body[name], int) for name in DURATIONS)
    short = client.post("/api/chat", {"model": "m", "messages": HI, "stream": False, "options": {"num_predict": 2}})
    assert short.json()["done_reason"] == "length" and short.json()["message"]["content"] == "Hello, "


def test_chat_streams_by_default() -> None:
    *pieces, last = lines(Client(), "/api/chat", {"messages": HI})
    assert "".join(piece["message"]["content"] for piece in pieces) == TEXT
    assert all(set(piece) == {"model", "created_at", "message", "done"} and not piece["done"] for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""} and last["done"] and last["done_reason"] == "stop"
    assert set(last) >= DURATIONS | COUNTS


def test_requests_that_only_load() -> None:
    client = Client()
    for path, key in (("/api/chat", "message"), ("/api/generate", "response")):
        body = client.post(path, {"model": "m", "keep_alive": "5m"}).json()
        assert set(body) == {"model", "created_at", key, "done", "done_reason"} and body["done_reason"] == "load"
    assert not client.engine.requests


def test_options() -> None:
    client = Client()
    # fmt: off
    options = {"num_predict": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.4, "min_p": 0.1, "typical_p": 0.9,
               "seed": 5, "repeat_penalty": 1.2, "repeat_last_n": 9, "mirostat": 2, "mirostat_tau": 4,
               "penalize_newline": False,
               "stop": ["x"], "num_keep": 2, "num_ctx": 99999, "low_vram": True, "unknown": {},
               "tfs_z": None}
    # fmt: on
    client.post("/api/chat", {"model": "m", "messages": HI, "stream": False, "options": options})
    request = client.engine.requests[-1]
    assert (request.n_predict, request.stop, request.n_keep) == (3, ("x",), 2)
    for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repeat_penalty", "repeat_last_n"):
        assert getattr(request.sampling, name) == options[name]
    assert request.sampling.mirostat == 2 and request.sampling.penalize_nl is False
    for given, n_predict in ((-1, -1), (0, -1), (-7, -1), (-2, -2)):
        client.post("/api/chat", {"model": "m", "messages": HI, "stream": False, "options": {"num_predict": given}})
        assert client.engine.requests[-1].n_predict == n_predict
    special = {"num_keep": -1, "top_k": 0, "repeat_last_n": -1, "seed": -1}
    client.post("/api/generate", {"model": "m", "prompt": "a", "stream": False, "options": special})
    request = client.engine.requests[-1]
    assert (request.n_keep, request.sampling.top_k, request.sampling.repeat_last_n) == (-1, 0, -1)
    assert request.sampling.random_seed


def test_format() -> None:
    client = Client()
    for form in ("json", {"type": "object"}):
        for path in ("/api/chat", "/api/generate"):
            client.post(path, {"model": "m", "messages": HI, "prompt": "a", "stream": False, "format": form})
            assert client.engine.requests[-1].constraint is not None
    client.post("/api/chat", {"model": "m", "messages": HI, "stream": False, "format": ""})
    assert client.engine.requests[-1].constraint is None
    assert "format" in error_of(client.post("/api/chat", {"model": "m", "messages": HI, "format": "yaml"}), 400)


def test_thinking() -> None:
    client = Client(chat_template=THINKING)
    client.engine.script = Script(pieces=("I ", "think</think>", "Yes"))
    body = client.post("/api/chat", {"model": "m", "messages": HI, "stream": False, "think": True}).json()
    assert body["message"] == {"role": "assistant", "content": "Yes", "thinking": "I think"}
    pieces = lines(client, "/api/generate", {"prompt": "hi", "think": "high"})
    assert "".join(piece.get("thinking", "") for piece in pieces) == "I think"
    assert "".join(piece["response"] for piece in pieces) == "Yes"
    client.post("/api/chat", {"model": "m", "messages": HI, "stream": False, "think": False})
    assert "<think>" not in client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert "think" in error_of(client.post("/api/chat", {"model": "m", "messages": HI, "think": "a lot"}), 400)
    assert "thinking" in error_of(Client().post("/api/chat", {"model": "m", "messages": HI, "think": True}), 400)


def test_tools() -> None:
    client = calling("I look. ")
    body = client.post("/api/chat", {"model": "m", "messages": HI, "tools": [WEATHER], "stream": False}).json()
    (call,) = body["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
    assert body["done_reason"] == "stop" and body["message"]["content"].strip() == "I look."
    pieces = lines(client, "/api/chat", {"messages": HI, "tools": [WEATHER]})
    calls = [piece["message"]["tool_calls"] for piece in pieces if "tool_calls" in piece["message"]]
    assert len(calls) == 1 and calls[0][0]["function"]["arguments"] == {"city": "Paris"}
    assert not pieces[-2]["done"] and pieces[-1]["done"]


def test_results_of_tools_find_their_calls() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"function": {"name": "time", "arguments": {}}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call, other, call]},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
    ]
    found = convert.to_chat(convert.OllamaChatBody.checked({"model": "m", "messages": messages}))["messages"]
    ids = [one["id"] for one in found[1]["tool_calls"]]
    assert [one["tool_call_id"] for one in found[2:]] == [ids[1], ids[0], ids[2]]
    assert (
        found[3]["name"] == "weather"
        and json.loads(found[1]["tool_calls"][0]["function"]["arguments"])["city"] == "Rome"
    )
    client = Client(chat_template=HERMES, engine=FakeEngine(fake_tokenizer(), n_ctx=2048))
    client.post("/api/chat", {"model": "m", "messages": messages, "tools": [WEATHER], "stream": False})
    sent = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert "Rome" in sent and "rain" in sent


def test_generate_and_its_context() -> None:
    client = Client()
    body = client.post("/api/generate", {"model": "m", "prompt": "hi", "system": "Be kind.", "stream": False}).json()
    first = client.engine.requests[-1].prompt
    assert set(body) == {"model", "created_at", "response", "done", "done_reason", "context"} | DURATIONS | COUNTS
    assert body["response"] == TEXT and body["context"][: len(first)] == list(first)
    assert "Be kind." in client.engine.tokenizer.decode(first)
    *pieces, last = lines(client, "/api/generate", {"prompt": "more", "context": body["context"]})
    assert "".join(piece["response"] for piece in pieces) == TEXT and last["response"] == ""
    second = client.engine.requests[-1].prompt
    assert second[: len(body["context"])] == tuple(body["context"])
    assert client.engine.tokenizer.decode(second).count("<|bos|>") == 1
    assert last["context"][: len(second)] == list(second)


def test_raw_text_and_infill() -> None:
    client = Client()
    body = client.post("/api/generate", {"model": "m", "prompt": "hi", "raw": True, "stream": False}).json()
    assert client.engine.tokenizer.decode(client.engine.requests[-1].prompt) in ("<|bos|>hi", "hi")
    assert "context" not in body and body["response"] == TEXT
    filled = client.post("/api/generate", {"model": "m", "prompt": "a", "suffix": "b", "stream": False})
    expected = client.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert filled.status_code == expected.status_code
    if filled.status_code == 200:
        assert client.engine.requests[-1].prompt == client.engine.requests[-2].prompt


def test_logprobs() -> None:
    fields = {"model": "m", "messages": HI, "stream": False, "logprobs": True, "top_logprobs": 2}
    found = Client().post("/api/chat", fields).json()["logprobs"]
    assert len(found) == 4 and found[0]["token"] == "Hello" and len(found[0]["top_logprobs"]) == 2
    pieces = lines(Client(), "/api/chat", {"messages": HI, "logprobs": True})
    assert sum(len(piece.get("logprobs", ())) for piece in pieces) == 4


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"messages": HI}, 400, "model is required"),
        ("/api/chat", {"model": 1, "messages": HI}, 400, "model must be a string, not 1"),
        ("/api/chat", {"model": "other", "messages": HI}, 404, "'other' not found"),
        ("/api/chat", {"model": "m", "messages": HI, "options": {"temperature": "hot"}}, 400, "temperature"),
        ("/api/chat", {"model": "m", "messages": HI, "options": [1]}, 400, "options must be an object, not an array"),
        ("/api/chat", {"model": "m", "messages": HI, "stream": "yes"}, 400, "stream must be true or false"),
        ("/api/chat", {"model": "m", "messages": HI, "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/chat", {"model": "m", "messages": [{"role": "user", "images": ["aGk="]}]}, 400, "image"),
        ("/api/chat", {"model": "m", "messages": {"role": "user"}}, 400, "messages must be an array"),
        ("/api/chat", {"model": "m", "messages": HI, "tools": [{"function": 1}]}, 400, "tools[0].function"),
        (
            "/api/chat",
            {"model": "m", "messages": HI, "top_logprobs": 21},
            400,
            "top_logprobs must be from 0 to 20, not 21",
        ),
        ("/api/generate", {"model": "m", "prompt": "a", "images": ["aGk="]}, 400, "image"),
        ("/api/generate", {"model": "m", "prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"model": "m", "prompt": "a", "context": [1 << 30]}, 400, "context[0]"),
        ("/api/embed", {"model": "m", "input": {}}, 400, "input"),
        ("/api/embed", {"model": "m", "input": "a", "dimensions": 9}, 400, "dimensions must be from 1 to "),
        ("/api/embed", {"model": "m", "input": "a" * 300, "truncate": False}, 400, "context size"),
        ("/api/embeddings", {"model": "m", "prompt": ["a"]}, 400, "prompt must be a string, not an array"),
        ("/api/pull", {"model": "other"}, 501, "gets no models"),
        ("/api/create", {"model": "m", "from": "x"}, 501, "create"),
        ("/api/copy", {"source": "m", "destination": "x"}, 501, "copy"),
        ("/api/push", {"model": "m"}, 501, "push"),
        ("/api/nothing", {}, 404, "Not Found"),
    ],
)
def test_errors(path: str, body: dict[str, Any], status: int, text: str) -> None:
    assert text in error_of(Client().post(path, body), status)


def test_failures_of_the_engine() -> None:
    client = Client()
    client.engine.script = Script(failure=Failure(500, "server_error", "broken"), fail_after=1)
    assert lines(client, "/api/chat", {"messages": HI})[-1] == {"error": "broken"}
    client.engine.script = Script(failure=Failure(500, "server_error", "broken"))
    assert error_of(client.post("/api/chat", {"model": "m", "messages": HI}), 500) == "broken"
    assert "Key" in error_of(Client(api_key="k").post("/api/chat", {"model": "m", "messages": HI}), 401)
    assert "Key" in error_of(Client(api_key="k", api_prefix="/x").post("/x/api/chat", {"model": "m"}), 401)


def test_lists_of_models() -> None:
    client = Client(alias="m, other")
    (entry,) = client.get("/api/tags").json()["models"]
    assert (
        entry["name"] == entry["model"] == "m" and entry["details"]["format"] == "gguf" and len(entry["digest"]) == 64
    )
    (running,) = client.get("/api/ps").json()["models"]
    assert running.items() >= entry.items() and running["context_length"] == 256 and running["size_vram"] == 0
    for name in ("m", "m:latest", "other"):
        shown = client.post("/api/show", {"model": name}).json()
        assert shown["model_info"]["llama.context_length"] == 256 and "im_start" in shown["template"]
    assert shown["capabilities"][0] == "completion" and "tools" not in shown["capabilities"]
    assert "tools" in calling().post("/api/show", {"model": "m"}).json()["capabilities"]
    error_of(client.post("/api/show", {"model": "none"}), 404)
    assert client.get("/api/version").json()["version"]


def test_pull_of_what_is_there() -> None:
    client = Client()
    assert client.post("/api/pull", {"model": "m", "stream": False}).json() == {"status": "success"}
    assert lines(client, "/api/pull", {}) == [{"status": "success"}]
    assert "delete" in error_of(client("DELETE", "/api/delete", {"model": "m"}), 501)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0), (-1, -1), (5.5, 5.5), ("5m", 300), ("1h30m", 5400), ("-1", -1), ("300", 300), ("1.5h", 5400),
     ("-2m", -120), ("500ms", 0.5), (None, None)],
)  # fmt: skip
def test_keep_alive(value: Any, seconds: float | None) -> None:
    assert convert.keep_alive(value) == seconds
    for wrong in ([value], "soon", "5 m", "5x", True):
        with pytest.raises(ApiError, match="keep_alive"):
            convert.keep_alive(wrong)


ODD = (None, True, 0, -1, 1.5, 1e30, "", "x", [], [1], [{}], [[]], {}, {"type": 5}, {"x": None})
WHOLE = {
    "model": "m", "stream": False, "prompt": "hi", "system": "s", "suffix": "", "raw": False, "context": [1],
    "think": False,
    "messages": [
        {"role": "user", "content": "hi", "images": []},
        {"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "options": {"num_predict": 3, "stop": ["a"], "seed": 1, "temperature": 0.5, "num_keep": 1},
    "format": "", "keep_alive": "5m", "logprobs": True, "top_logprobs": 1,
}  # fmt: skip


def variants(value: Any) -> Any:
    """The value with every part of it replaced by odd ones, one at a time."""
    yield from ODD
    if isinstance(value, dict):
        for key, part in value.items():
            yield from (value | {key: odd} for odd in variants(part))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from ([*value[:i], odd, *value[i + 1 :]] for odd in variants(part))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_odd_requests_are_the_clients_mistake(path: str) -> None:
    client = Client(engine=FakeEngine(fake_tokenizer(), n_ctx=2048))

    async def work() -> set[int]:
        seen = set()
        transport = httpx.ASGITransport(app=client.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for body in variants(WHOLE):
                response = await http.post(path, json=body)
                assert response.status_code in (200, 400, 404, 501), (json.dumps(body), client.log.getvalue()[-500:])
                seen.add(response.status_code)
        return seen

    assert {200, 400} <= asyncio.run(work())
