"""Conversations: OpenAI's chat completions and responses, Anthropic's messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, fake_tokenizer
from server_client import Client
from test_server_http import error_of

from ikcli.errors import IkError, UsageError
from ikcli.server.slots.messages import Failure

TEXT = "Hello, wörld!"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# A template of the Hermes kind: it lists tools and writes calls between tags.
HERMES = """{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}{% endfor %}
For each function call return a json object within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = ("<tool", "_call>\n", '{"name": "weather", ', '"arguments": {"city"', ': "Paris"}}', "\n</tool_call>")


def calling(*pieces: str) -> Client:
    """A client whose model calls the weather function."""
    client = Client(chat_template=HERMES, engine=FakeEngine(fake_tokenizer(), n_ctx=2048))
    client.engine.script = Script(pieces=(*pieces, *CALL))
    return client


def test_turns_of_models_that_need_checkpoints() -> None:
    """The engine is told where the first and the last user turn begin; other models are not asked to."""
    talk = [
        {"role": "system", "content": "Be brief and kind."},
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
    ]
    client = Client(chat_template=HERMES, engine=FakeEngine(fake_tokenizer(), n_ctx=2048))
    client.post("/v1/chat/completions", {"messages": talk})
    assert client.engine.requests[-1].turns == ()
    client.engine.model = replace(client.engine.model, needs_checkpoints=True)
    client.post("/v1/chat/completions", {"messages": talk})
    prompt, turns = client.engine.requests[-1].prompt, client.engine.requests[-1].turns
    text = client.post("/detokenize", {"tokens": list(prompt)}).json()["content"]
    starts = [client.post("/detokenize", {"tokens": list(prompt[:n])}).json()["content"] for n in turns]
    assert len(turns) == 2 and all(text.startswith(start) for start in starts)
    assert "kind." in starts[0] and "first" not in starts[0]
    assert "first answer" in starts[1] and "second" not in starts[1]


def test_chat_completion() -> None:
    client = Client()
    for path in ("/v1/chat/completions", "/chat/completions"):
        body = client.post(path, {"messages": HI, "max_tokens": 2, "model": "x"}).json()
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "x"
        assert body["choices"] == [
            {"finish_reason": "length", "index": 0, "message": {"role": "assistant", "content": "Hello, "}}
        ]
        assert body["usage"]["completion_tokens"] == 2
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        assert body["timings"]["predicted_n"] == 2 and body["system_fingerprint"].startswith("b")
    sent = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert sent == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_chat_stream() -> None:
    client = Client()
    events = client.events("/v1/chat/completions", {"messages": HI, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "timings" not in events[0]
    body = events[1:-3]
    assert "".join(event["choices"][0]["delta"]["content"] for event in body) == TEXT
    assert events[-3]["choices"][0] == {"finish_reason": "stop", "index": 0, "delta": {}}
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 4
    assert "timings" in events[-2]
    assert all(event["object"] == "chat.completion.chunk" for event in events[:-1])
    assert len({event["id"] for event in events[:-1]}) == 1
    plain = client.events("/v1/chat/completions", {"messages": HI})
    assert "usage" not in plain[-2] and "timings" in plain[-2]


def test_several_choices() -> None:
    client = Client()
    body = client.post("/v1/chat/completions", {"messages": HI, "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    events = client.events("/v1/chat/completions", {"messages": HI, "n": 2})
    for index in (0, 1):
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "stop"
        assert "".join(choice["delta"].get("content") or "" for choice in mine) == TEXT


def test_logprobs() -> None:
    client = Client()
    fields = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    content = client.post("/v1/chat/completions", fields).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "Hello" and len(content[0]["top_logprobs"]) == 2 and len(content) == 4
    assert client.engine.requests[-1].sampling.n_probs == 2
    found = [e["choices"][0].get("logprobs") for e in client.events("/v1/chat/completions", fields)[1:-2]]
    assert [len(item["content"]) for item in found] == [1, 1, 1, 1]
    content = client.post("/v1/chat/completions", fields | {"top_logprobs": 0}).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert content[0]["top_logprobs"] == [] and content[0]["logprob"] == -0.5
    client.post("/v1/chat/completions", {"messages": HI, "logprobs": True})
    assert client.engine.requests[-1].sampling.n_probs == 20
    error_of(client.post("/v1/chat/completions", {"messages": HI, "top_logprobs": 2}), 400)


@pytest.mark.parametrize(
    ("fields", "name"),
    [({}, "messages"), ({"messages": None}, "messages"), ({"messages": "x"}, "messages"),
     ({"messages": []}, "messages"),
     ({"messages": [123]}, "messages[0]"), ({"messages": [{}]}, "role"), ({"messages": [{"role": 123}]}, "role"),
     ({"messages": [{"role": "system", "content": 123}]}, "content"), ({"messages": [{"role": "user"}]}, "content"),
     ({"messages": [*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}, "assistant"),
     ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image"),
     ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "content[0]"),
     ({"messages": HI, "response_format": {"type": "sound"}}, "response_format"),
     ({"messages": HI, "response_format": 5}, "response_format"),
     ({"messages": HI, "response_format": {"type": "json_object", "schema": 123}}, "response_format"),
     ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
     ({"messages": HI, "tools": 5}, "tools"), ({"messages": HI, "tools": [{}]}, "tools[0]"),
     ({"messages": HI, "tools": [WEATHER], "tool_choice": "dance"}, "tool_choice"),
     ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
     ({"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
      "tool_choice"),
     ({"messages": HI, "tools": [WEATHER], "grammar": "root ::= \"a\""}, "grammar"),
     ({"messages": HI, "chat_template_kwargs": 5}, "chat_template_kwargs"),
     ({"messages": HI, "chat_template_kwargs": {"enable_thinking": "x"}}, "enable_thinking"),
     ({"messages": HI, "reasoning_format": "x"}, "reasoning_format"), ({"messages": HI, "logprobs": 5}, "logprobs"),
     ({"messages": HI, "reasoning_budget_tokens": "x"}, "reasoning_budget_tokens"),
     ({"messages": HI, "n": 0}, "n"), ({"messages": HI, "temperature": "x"}, "temperature")],
)  # fmt: skip
def test_wrong_chats_are_named(fields: dict[str, Any], name: str) -> None:
    client = Client()
    assert name in error_of(client.post("/v1/chat/completions", fields), 400)
    assert not client.engine.requests


def test_templates_that_refuse_or_are_broken() -> None:
    client = Client(chat_template="{{ raise_exception('only poems') }}")
    assert "only poems" in error_of(client.post("/v1/chat/completions", {"messages": HI}), 400)
    client = Client()
    client.engine.model.metadata["tokenizer.chat_template"] = "{% for %}"  # type: ignore[index]
    assert "chat template" in error_of(client.post("/v1/chat/completions", {"messages": HI}), 400)
    assert client.get("/props").json()["chat_template"] == "{% for %}"
    from ikcli.server.http.chat import check_options

    for options in ({"chat_template": "{% for %}"}, {"chat_template": "nosuchname"}, {"chat_template_kwargs": "{"},
                    {"chat_template_kwargs": "[]"}):  # fmt: skip
        with pytest.raises((IkError, UsageError)):
            check_options(Client(**options).config)
    check_options(Client(chat_template="chatml").config)


def test_apply_template_and_counts() -> None:
    client = Client()
    prompt = client.post("/apply-template", {"messages": HI}).json()
    assert prompt == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    open_end = client.post("/apply-template", {"messages": HI, "add_generation_prompt": False}).json()["prompt"]
    assert open_end == "<|im_start|>user\nhi<|im_end|>\n"
    prefilled = client.post("/apply-template", {"messages": [*HI, {"role": "assistant", "content": "Wh"}]}).json()
    assert prefilled["prompt"].endswith("<|im_start|>assistant\nWh")
    n = len(client.engine.tokenizer.encode(prompt["prompt"]))
    for path in ("/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"):
        assert client.post(path, {"messages": HI}).json()["input_tokens"] == n
    assert client.post("/v1/responses/input_tokens", {"input": "hi"}).json()["input_tokens"] == n
    assert not client.engine.requests


def test_schemas_that_cannot_be_followed() -> None:
    """In tools the keyword is left out and the log says so; an answer's schema is refused with its place."""
    schema = {"type": "object", "properties": {"slug": {"type": "string", "pattern": "^(?!-)[a-z]+$"}}}
    tool = {"type": "function", "function": {"name": "rename", "parameters": schema | {"required": None}}}
    client = calling()
    for choice in ("auto", "required"):
        body = {"messages": HI, "tools": [WEATHER, tool], "tool_choice": choice}
        answer = client.post("/v1/chat/completions", body).json()["choices"][0]
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    client.post("/v1/chat/completions", body)
    n_requests = len(client.engine.requests)
    said = [line for line in client.log.getvalue().splitlines() if "tool rename: " in line]
    for place in ("#/properties/slug/pattern", "#/required"):
        assert sum(place in line for line in said) == len(client.engine.requests)  # each of its own server
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"response_format": form}, {"response_format": form, "tools": [WEATHER]}):
        error = error_of(client.post("/v1/chat/completions", {"messages": HI, **fields}), 400)
        assert error.startswith("json_schema: at #/properties/slug/pattern: ")
    for route, fields in (("/completion", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HI})):
        error = error_of(client.post(route, fields | {"json_schema": schema}), 400)
        assert error.startswith("json_schema: at #/properties/slug/pattern: ")
    assert len(client.engine.requests) == n_requests


def test_tool_calls() -> None:
    client = calling("Let me see.")
    choice = client.post("/v1/chat/completions", {"messages": HI, "tools": [WEATHER]}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    events = client.events("/v1/chat/completions", {"messages": HI, "tools": [WEATHER]})
    calls = [c for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"] and calls[0]["index"] == 0
    assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"city": "Paris"}
    assert all("name" not in c["function"] for c in calls[1:])
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert client.post("/v1/chat/completions", {"messages": HI}).json()["choices"][0]["finish_reason"] == "stop"


def test_anthropic_answer() -> None:
    client = Client()
    body = client.post("/v1/messages", {"messages": HI, "max_tokens": 2, "system": "be brief"}).json()
    assert body["type"] == "message" and body["role"] == "assistant" and body["id"].startswith("msg_")
    assert body["content"] == [{"type": "text", "text": "Hello, "}]
    assert body["stop_reason"] == "max_tokens" and body["stop_sequence"] is None and "timings" not in body
    assert body["usage"]["cache_read_input_tokens"] == 1 and body["usage"]["output_tokens"] == 2
    assert "be brief" in client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert client.post("/v1/messages", {"messages": HI}).json()["stop_reason"] == "end_turn"
    client.engine.script = Script(stop="word", word="END")
    body = client.post("/v1/messages", {"messages": HI, "stop_sequences": ["END"]}).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    assert client.engine.requests[-1].stop[0] == "END" and client.engine.requests[-1].n_predict == 4096


def test_anthropic_stream() -> None:
    events = Client().events("/v1/messages", {"messages": HI, "max_tokens": 50})
    kinds = [event["type"] for event in events]
    assert kinds == ["message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop",
                     "message_delta", "message_stop"]  # fmt: skip
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == TEXT
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4


def test_anthropic_tools() -> None:
    client = calling("Let me see.")
    tool = {"name": "weather", "description": "d", "input_schema": WEATHER["function"]["parameters"]}
    body = client.post("/v1/messages", {"messages": HI, "tools": [tool], "tool_choice": {"type": "auto"}}).json()
    assert [block["type"] for block in body["content"]] == ["text", "tool_use"]
    assert body["content"][1]["name"] == "weather" and body["content"][1]["input"] == {"city": "Paris"}
    assert body["stop_reason"] == "tool_use"
    events = client.events("/v1/messages", {"messages": HI, "tools": [tool]})
    starts = [event for event in events if event["type"] == "content_block_start"]
    stops = [event for event in events if event["type"] == "content_block_stop"]
    assert [event["index"] for event in starts] == [event["index"] for event in stops] == [0, 1]
    assert starts[1]["content_block"]["type"] == "tool_use" and starts[1]["content_block"]["input"] == {}
    pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"city": "Paris"}


def test_anthropic_thinking() -> None:
    client = Client()
    client.engine.script = Script(pieces=("<think>", "so ", "so", "</think>", "Yes"))
    body = client.post("/v1/messages", {"messages": HI}).json()
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]
    assert body["content"][0]["thinking"].strip() == "so so" and body["content"][0]["signature"] == ""
    events = client.events("/v1/messages", {"messages": HI})
    kinds = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert kinds[0] == "thinking_delta" and "signature_delta" in kinds and kinds[-1] == "text_delta"
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1]


def test_anthropic_output_follows_a_schema() -> None:
    client = Client()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        assert client.post("/v1/messages", {"messages": HI} | fields).status_code == 200
        assert client.engine.requests[-1].constraint is not None
    assert client.post("/v1/messages", {"messages": HI, "output_config": {"format": None}}).status_code == 200
    assert client.engine.requests[-1].constraint is None


def test_anthropic_conversation_with_tools() -> None:
    client = Client(chat_template=HERMES)
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sunny"}]}
    messages = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "text", "text": "Here:"}, result]},
    ]
    assert client.post("/v1/messages", {"messages": messages}).status_code == 200
    sent = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert '"name": "weather"' in sent and "Here:" in sent and "Sunny" in sent
    system = [{"type": "text", "text": "x-anthropic-billing: 1"}, {"type": "text", "text": "be kind"}]
    client.post("/v1/messages", {"messages": HI, "system": system})
    sent = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert "be kind" in sent and "billing" not in sent


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"max_tokens": 5}, "messages"), ({"messages": 5}, "messages"), ({"messages": [5]}, "messages[0]"),
     ({"messages": HI, "max_tokens": "x"}, "max_tokens"), ({"messages": HI, "tools": [5]}, "tools[0]"),
     ({"messages": HI, "tools": [{"name": 5}]}, "tools[0].name"), ({"messages": HI, "system": 5}, "system"),
     ({"messages": HI, "tool_choice": {"type": "x"}}, "tool_choice"),
     ({"messages": HI, "thinking": {"type": "x"}}, "thinking"), ({"messages": HI, "output_config": 5}, "output_config"),
     ({"messages": HI, "output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
     ({"messages": HI, "output_format": {"type": "json_schema"}}, "output_format.schema"),
     ({"messages": HI, "stop_sequences": [5]}, "stop_sequences[0]"), ({"messages": HI, "metadata": 5}, "metadata"),
     ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image input is not supported"),
     ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "content[0].type")],
)  # fmt: skip
def test_wrong_anthropic_requests_are_named(fields: dict[str, Any], name: str) -> None:
    client = Client()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = client.post(path, fields)
        assert response.status_code == 400 and name in response.json()["error"]["message"], response.text
        assert response.json()["type"] == "error"


def test_responses_answer() -> None:
    client = Client()
    body = client.post("/v1/responses", {"input": "hi", "instructions": "be brief", "temperature": 0.5}).json()
    assert body["object"] == "response" and body["id"].startswith("resp_") and body["status"] == "completed"
    item = body["output"][0]
    assert item["type"] == "message" and item["id"].startswith("msg_") and item["status"] == "completed"
    assert item["content"][0] == {"type": "output_text", "annotations": [], "logprobs": [], "text": TEXT}
    assert body["instructions"] == "be brief" and body["temperature"] == 0.5 and body["error"] is None
    usage = body["usage"]
    assert usage["output_tokens"] == 4 and usage["input_tokens_details"] == {"cached_tokens": 1}
    assert "output_tokens_details" in usage and usage["total_tokens"] == usage["input_tokens"] + 4
    body = client.post("/v1/responses", {"input": HI, "max_output_tokens": 2}).json()
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}


def test_responses_stream() -> None:
    client = Client()
    for limit, end in ((None, "completed"), (2, "incomplete")):
        events = client.events("/v1/responses", {"input": "hi", "max_output_tokens": limit})
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        deltas = ["output_text.delta"] * (limit or 4)
        assert kinds == ["created", "in_progress", "output_item.added", "content_part.added", *deltas,
                         "output_text.done", "content_part.done", "output_item.done", end]  # fmt: skip
        ids = {event["item_id"] for event in events if "item_id" in event}
        assert ids == {events[2]["item"]["id"]}
        assert all(event["output_index"] == 0 for event in events[2:-1])
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
        assert events[-1]["response"]["usage"]["output_tokens"] == len(deltas)
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_responses_tools_and_reasoning() -> None:
    client = calling("<think>", "so", "</think>")
    tool = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    body = client.post("/v1/responses", {"input": "hi", "tools": [tool, {"type": "web_search"}]}).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]
    assert json.loads(body["output"][1]["arguments"]) == {"city": "Paris"} and body["output"][1]["call_id"]
    events = client.events("/v1/responses", {"input": "hi", "tools": [tool]})
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert json.loads(done[0]["arguments"]) == {"city": "Paris"}
    sent = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(sent) == done[0]["arguments"]


def test_responses_conversation() -> None:
    client = Client(chat_template=HERMES)
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
        {"role": "user", "content": "thanks"},
    ]
    assert client.post("/v1/responses", {"input": items}).status_code == 200
    sent = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    for text in ("rules", "hi", '"Rome"', "Rain", "It rains.", "thanks"):
        assert text in sent


@pytest.mark.parametrize(
    ("fields", "name"),
    [({}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0]"),
     ({"input": [{"type": "x"}]}, "input[0].type"),
     ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
     ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
     ({"input": [{"type": "function_call", "name": "a"}]}, "arguments"), ({"input": "a", "text": 5}, "text"),
     ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
     ({"input": "a", "text": {"format": {"type": "x"}}}, "text.format.type"), ({"input": "a", "tools": 5}, "tools"),
     ({"input": "a", "max_output_tokens": "x"}, "max_output_tokens"), ({"input": "a", "reasoning": 5}, "reasoning")],
)  # fmt: skip
def test_wrong_responses_requests_are_named(fields: dict[str, Any], name: str) -> None:
    assert name in error_of(Client().post("/v1/responses", fields), 400)


def test_errors_within_streams() -> None:
    client = Client()
    client.engine.script = Script(failure=Failure(500, "server_error", "broke"), fail_after=1)
    events = client.events("/v1/chat/completions", {"messages": HI})
    assert events[-1] == {"error": {"code": 500, "message": "broke", "type": "server_error"}}
    events = client.events("/v1/messages", {"messages": HI})
    assert events[-1]["type"] == "error" and events[-1]["error"]["message"] == "broke"
    events = client.events("/v1/responses", {"input": "hi"})
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]


def test_reasoning_content() -> None:
    client = Client()
    client.engine.script = Script(pieces=("<think>", "so so", "</think>", "Yes"))
    message = client.post("/v1/chat/completions", {"messages": HI}).json()["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "so so" and message["content"] == "Yes"
    fields = {"messages": HI, "reasoning_format": "none"}
    message = client.post("/v1/chat/completions", fields).json()["choices"][0]["message"]
    assert message["content"] == "<think>so so</think>Yes" and "reasoning_content" not in message


def test_reasoning_budget() -> None:
    from ikcli.server.http.budget import ReasoningBudget

    tokenizer = fake_tokenizer()
    budget = ReasoningBudget(
        None, tokenizer, open="<think>", close="</think>", budget=3, opened=False, message="Enough."
    )
    for token in tokenizer.encode("<think>abc", add_special=False):
        assert budget.mask() is None
        budget.accept(token)
    forced = []
    while (mask := budget.mask()) is not None:
        allowed = [i for i in range(tokenizer.n_vocab) if mask[i // 32] >> (i % 32) & 1]
        assert len(allowed) == 1
        forced += allowed
        budget.accept(allowed[0])
    assert tokenizer.decode(forced) == "Enough.</think>"
    free = ReasoningBudget(None, tokenizer, open="<think>", close="</think>", budget=1, opened=False)
    for token in tokenizer.encode("An answer without thinking", add_special=False):
        assert free.mask() is None
        free.accept(token)
    assert free.finished is False
    client = Client()
    client.post("/v1/chat/completions", {"messages": HI, "reasoning_budget_tokens": 5})
    constraint = client.engine.requests[-1].constraint
    assert constraint is not None and constraint().mask() is None
    client.post("/v1/chat/completions", {"messages": HI})
    assert client.engine.requests[-1].constraint is None


def test_control_tokens_are_shown_where_the_parser_needs_them() -> None:
    client = Client(engine=FakeEngine(fake_tokenizer(extra={"<think>": 3, "</think>": 3})))
    client.post("/v1/chat/completions", {"messages": HI})
    assert client.engine.requests[-1].keep_special is True
    plain = Client()
    plain.post("/v1/chat/completions", {"messages": HI})
    assert plain.engine.requests[-1].keep_special is False
