"""Conversations as clients of each API send them: mixed blocks in order, what is unknown here, tools of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, fake_tokenizer
from server_client import Client
from test_server_chat import HERMES, HI, WEATHER
from test_server_http import error_of

from ikcli.server.http.dialects import anthropic, ollama, responses
from ikcli.server.http.dialects.responses_tools import ClientTools

# Roles as strict templates want them: the user and the assistant alternate, results follow the call.
STRICT = """{# <tool_call> #}{%- if tools %}{{ tools | tojson }}{% endif %}{%- set ns = namespace(last='') %}
{%- for m in messages %}
{%- set allowed = {'': 'system user', 'system': 'user', 'user': 'assistant', 'assistant': 'user tool',
                   'tool': 'tool assistant user'} %}
{%- if m.role not in allowed[ns.last].split() %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'tool' and ns.last == 'assistant' and not ns.calls %}{{ raise_exception('no call') }}{% endif %}
{%- set ns.last = m.role %}{%- set ns.calls = m.tool_calls %}
{{- '<' + m.role + '>' }}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}' }}{% endfor %}
{%- endfor %}{%- if add_generation_prompt %}<assistant>{% endif %}"""
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
ASSISTANT = {"role": "assistant", "content": [USE]}
CALL = '<assistant>{"name": "weather", "arguments": {"city": "Rome"}}'
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
IMAGE = "[image left out: this model reads text only]"
FUNCTION = {"type": "function", "name": "read_file", "parameters": WEATHER["function"]["parameters"]}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "files of the user", "tools": [FUNCTION]}


def client_of(template: str = STRICT) -> Client:
    return Client(chat_template=template, engine=FakeEngine(fake_tokenizer(), n_ctx=4096))


def prompt_of(path: str, body: dict[str, Any], template: str = STRICT) -> str:
    """The prompt of an accepted request, from the first turn on."""
    client = client_of(template)
    response = client.post(path, body | ({"model": "m", "stream": False} if path.startswith("/api") else {}))
    assert response.status_code == 200, response.text
    return str(client.engine.tokenizer.decode(client.engine.requests[-1].prompt)).removeprefix("<|bos|>")


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content} | more


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


# --- blocks in order --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "turns"),
    [
        ([result("Rain"), text("go on")], "<tool>Rain<user>go on"),
        ([text("go on"), result("Rain")], "<tool>Rain<user>go on"),
        ([text("a"), result("Rain"), text("b")], "<tool>Rain<user>a\nb"),
        ([result("Rain")], "<tool>Rain"),
        ([result([text("one"), text("two")])], "<tool>one\ntwo"),
        ([result([PNG])], f"<tool>{IMAGE}"),
        ([result([text("before"), PNG, text("after")])], f"<tool>before\n{IMAGE}\nafter"),
        ([result("it broke", is_error=True)], "<tool>Error: it broke"),
        ([result([text("Error: it broke")], is_error=True)], "<tool>Error: it broke"),
        ([result(None, is_error=True)], "<tool>Error"),
        ([result("fine", is_error=False)], "<tool>fine"),
        ([result([{"type": "search_result", "source": "http://x", "title": "T", "content": [text("found")]}])],
         "<tool>http://x\nT\nfound"),
        ([result([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a page"}}])],
         "<tool>a page"),
        ([result([{"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}])],
         "<tool>[file left out: this model reads text only]"),
        ([result([{"type": "tool_reference", "tool_name": "other"}])], "<tool>other"),
        ([result([{"type": "json", "json": {"city": "Rome", "degrees": 21}}])],
         '<tool>{"json": {"city": "Rome", "degrees": 21}}'),
        ([result([{"type": "of_the_future", "id": "x"}])],
         "<tool>[of_the_future left out: this model reads text only]"),
    ],
)  # fmt: skip
def test_anthropic_results_follow_the_call(blocks: list[Any], turns: str) -> None:
    body = {"messages": [*HI, ASSISTANT, {"role": "user", "content": blocks}]}
    assert prompt_of("/v1/messages", body) == f"<user>hi{CALL}{turns}<assistant>"


def test_several_results_stand_together() -> None:
    other = USE | {"id": "t2", "input": {"city": "Oslo"}}
    blocks = [result("Rain"), text("and"), result("Snow") | {"tool_use_id": "t2"}]
    messages = [
        *HI,
        {"role": "assistant", "content": [text("I look."), USE, other]},
        {"role": "user", "content": blocks},
    ]
    assert [m["role"] for m in anthropic.to_chat({"messages": messages})["messages"]] == [
        "user", "assistant", "tool", "tool", "user"]  # fmt: skip
    assert "<assistant>I look.{" in (sent := prompt_of("/v1/messages", {"messages": messages}))
    assert sent.endswith("<tool>Rain<tool>Snow<user>and<assistant>")


def test_results_follow_their_calls_across_messages() -> None:
    messages = [*HI, ASSISTANT, *HI, {"role": "user", "content": [result("Rain")]}]
    assert prompt_of("/v1/messages", {"messages": messages}) == f"<user>hi{CALL}<tool>Rain<user>hi<assistant>"
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USE]}
    messages = [
        *HI,
        thought,
        {"role": "user", "content": [result("Rain")]},
        {"role": "assistant", "content": "Wet."},
        *HI,
    ]
    sent = prompt_of("/v1/messages", {"messages": messages})
    assert sent == f"<user>hi{CALL.replace('>', '>(hm)')}<tool>Rain<assistant>Wet.<user>hi<assistant>"


@pytest.mark.parametrize(
    ("blocks", "turn"),
    [
        ([{"type": "thinking", "thinking": "hm", "signature": "s"}, text("a")], "(hm)a"),
        ([{"type": "redacted_thinking", "data": "secret"}, text("a")], "a"),
        ([{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rust"}}, text("a")],
         "[server_tool_use: web_search\nrust]\na"),
        ([{"type": "web_search_tool_result", "tool_use_id": "s", "content": [
            {"type": "web_search_result", "title": "T", "url": "http://x", "encrypted_content": "secret"}]}, text("a")],
         "[web_search_tool_result: T\nhttp://x]\na"),
        ([{"type": "mcp_tool_result", "tool_use_id": "s", "is_error": False, "content": [text("r")]}],
         "[mcp_tool_result: r]"),
        ([PNG, text("a")], f"{IMAGE}\na"),
        ([{"type": "container_upload", "file_id": "f"}, text("a")],
         "[file left out: this model reads text only]\na"),
        ([{"type": "of_the_future", "mode": 3}, text("a")], "a"),
        ([{"type": "of_the_future", "text": "b"}, text("a")], "b\na"),
    ],
)  # fmt: skip
def test_anthropic_history_of_the_assistant(blocks: list[Any], turn: str) -> None:
    messages = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": "go on"}]
    assert prompt_of("/v1/messages", {"messages": messages}) == f"<user>hi<assistant>{turn}<user>go on<assistant>"


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (PNG, "image input is not supported"),
        ({"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}, "file input is not supported"),
        ({"type": "document", "source": {"type": "url", "url": "http://x"}}, "file input is not supported"),
        ({"type": "container_upload", "file_id": "f"}, "file input is not supported"),
        (
            {"type": "document", "source": {"type": "content", "content": [text("a"), PNG]}},
            "image input is not supported",
        ),
        ({"type": "of_the_future", "n": 1}, "found no text in"),
    ],
)
def test_what_a_user_would_miss_is_an_error(block: dict[str, Any], problem: str) -> None:
    for role in ("user", "system"):
        body: dict[str, Any] = {"messages": [{"role": role, "content": [text("see"), block]}]}
        for path in ("/v1/messages", "/v1/chat/completions"):
            message = client_of().post(path, body).json()["error"]["message"]
            assert "messages[0].content[1]" in message and problem in message
        message = client_of().post("/v1/responses", {"input": body["messages"]}).json()["error"]["message"]
        assert "input[0].content[1]" in message and problem in message
    message = client_of().post("/v1/messages", {"messages": HI, "system": [block]}).json()["error"]["message"]
    assert "system[0]" in message and problem in message


@pytest.mark.parametrize("content", [None, 5, {"type": "text", "text": "a"}])
def test_wrong_content_is_named_by_its_place(content: Any) -> None:
    body = {"system": "s", "messages": [*HI, {"role": "user", "content": content}]}
    assert "messages[1].content" in client_of().post("/v1/messages", body).json()["error"]["message"]


def test_texts_of_users_are_found_in_any_part() -> None:
    source = {"type": "content", "content": [text("one"), text("two")]}
    parts = [
        {"type": "document", "title": "T", "source": source},
        {"type": "of_the_future", "text": "three", "n": 1},
        {"type": "json", "json": {"city": "Rome", "degrees": 21}},
    ]
    for path, body in (("/v1/messages", {"messages": [{"role": "user", "content": parts}]}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}),
                       ("/v1/responses", {"input": [{"role": "user", "content": parts}]})):  # fmt: skip
        assert prompt_of(path, body) == '<user>T\none\ntwo\nthree\n{"json": {"city": "Rome", "degrees": 21}}<assistant>'


def test_chat_completions_with_other_parts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    thought = {"type": "thinking", "thinking": [text("hm")]}
    messages = [
        *HI,
        {"role": "assistant", "content": [thought, text("I look.")], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("see"), image]},
        {"role": "assistant", "content": None, "audio": {"id": "a"}},
        *HI,
        {"role": "assistant", "content": None, "refusal": "No."},
        *HI,
    ]
    sent = prompt_of("/v1/chat/completions", {"messages": messages})
    note = "[audio left out: this model reads text only]"
    assert sent == (f"<user>hi<assistant>(hm)I look.{CALL.removeprefix('<assistant>')}<tool>see\n{IMAGE}"
                    f"<assistant>{note}<user>hi<assistant>No.<user>hi<assistant>")  # fmt: skip


def test_calls_of_other_types_in_chat_completions() -> None:
    calls = [{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "+x"}},
             {"id": "b", "type": "web_search", "web_search": {"query": "q"}}]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": id, "content": "r"} for id in "ab"]
    sent = prompt_of("/v1/chat/completions", {"messages": [*HI, {"role": "assistant", "tool_calls": calls}, *results]})
    assert '{"name": "patch", "arguments": {"input": "+x"}}{"name": "web_search", "arguments": {"query": "q"}}' in sent


def test_ollama_images() -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    messages = [*HI, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "see", "images": ["iVBO"]}]
    assert prompt_of("/api/chat", {"messages": messages}) == f"<user>hi{CALL}<tool>see\n{IMAGE}<assistant>"
    body = {"model": "m", "messages": [{"role": "user", "content": "see", "images": ["iVBO"]}]}
    response = client_of().post("/api/chat", body)
    assert response.status_code == 400 and "messages[0].images" in response.json()["error"]


# --- arguments that are no object -------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong", ['{"city": "Ro', "[1]", [1], 5])
def test_arguments_that_are_no_object_end_no_conversation(wrong: Any) -> None:
    shown = wrong if isinstance(wrong, str) else json.dumps(wrong)
    function = {"name": "weather", "arguments": wrong}
    answer = {"role": "tool", "tool_call_id": "t1", "content": "bad arguments"}
    chat = [*HI, {"role": "assistant", "tool_calls": [{"id": "t1", "type": "function", "function": function}]}, answer]
    for_ollama = [
        *HI,
        {"role": "assistant", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "bad arguments"},
    ]
    for_anthropic = [*HI, {"role": "assistant", "content": [USE | {"input": wrong}]},
                 {"role": "user", "content": [result("bad arguments")]}]  # fmt: skip
    items = [*HI, {"type": "function_call", "call_id": "t1", **function},
             {"type": "function_call_output", "call_id": "t1", "output": "bad arguments"}]  # fmt: skip
    for path, body in (("/v1/chat/completions", {"messages": chat}), ("/api/chat", {"messages": for_ollama}),
                       ("/v1/messages", {"messages": for_anthropic}), ("/v1/responses", {"input": items})):  # fmt: skip
        sent = prompt_of(path, body)
        assert json.dumps({"arguments": shown}) in sent and "<tool>bad arguments" in sent, path


# --- items of the Responses API ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("items", "turn"),
    [
        ([{"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}],
         "[web_search_call: q]\n"),
        ([{"type": "file_search_call", "id": "w", "queries": ["q"], "results": [{"file_id": "f", "text": "found"}]}],
         "[file_search_call: found]\n"),
        ([{"type": "image_generation_call", "id": "w", "status": "completed", "result": "iVBORw0KGgo="}],
         f"[image_generation_call: {IMAGE}]\n"),
        ([{"type": "mcp_list_tools", "id": "w", "server_label": "s", "tools": [{"name": "x", "input_schema": {}}]}],
         ""),
        ([{"type": "mcp_call", "id": "w", "name": "f", "arguments": "{}", "output": "r", "server_label": "s"}],
         "[mcp_call: f\n{}\nr\ns]\n"),
        ([{"type": "code_interpreter_call", "id": "w", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}],
         "[code_interpreter_call: 1+1\n2]\n"),
        ([{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}], "(hm)"),
        ([{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "secret"}], ""),
        ([{"type": "compaction", "id": "r", "encrypted_content": "secret"}],
         "[compaction: encrypted; only its author can decrypt it]\n"),
        ([{"type": "of_the_future", "id": "r", "status": "completed", "n": 1}], ""),
        ([{"type": "of_the_future", "id": "r", "content": None}], ""),
        ([{"type": "of_the_future", "id": "r", "content": [{"said": "b"}]}], "[of_the_future: b]\n"),
        ([{"type": "of_the_future", "id": "r", "content": [{"type": "output_text", "text": "b"}]}], "b\n"),
        ([{"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["p"]}},
          {"type": "tool_search_output", "id": "r", "call_id": None, "execution": "server", "tools": []}],
         "[tool_search_call: server\np]\n"),
        ([{"type": "message", "role": "assistant", "content": None}], ""),
        ([{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}], "b\n"),
    ],
)  # fmt: skip
def test_items_of_services_in_the_history(items: list[Any], turn: str) -> None:
    last = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    sent = prompt_of("/v1/responses", {"input": [*HI, *items, last, *HI]})
    assert sent == f"<user>hi<assistant>{turn}a<user>hi<assistant>"


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments", "shown"),
    [
        ({"type": "custom_tool_call", "name": "patch", "input": "+x"}, {"output": "done"}, "patch", {"input": "+x"},
         "done"),
        ({"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}, {"output": "a b"}, "local_shell",
         {"type": "exec", "command": ["ls"]}, "a b"),
        ({"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}, {"output": "a b", "id": "c1",
         "call_id": None}, "local_shell", {"type": "exec", "command": ["ls"]}, "a b"),
        ({"type": "shell_call", "action": {"commands": ["ls"]}, "environment": {"type": "local"}},
         {"output": [{"stdout": "a b", "outcome": {"type": "exit"}}]}, "shell", {"commands": ["ls"]},
         '{"stdout": "a b"'),
        ({"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "p"}},
         {"status": "failed", "output": "no such file"}, "apply_patch", {"type": "delete_file", "path": "p"},
         "Error: no such file"),
        ({"type": "computer_call", "action": {"type": "click", "x": 1}},
         {"output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"}}, "computer",
         {"type": "click", "x": 1}, IMAGE),
        ({"type": "future_call", "arguments": '{"a": 1}'}, {"result": "ok"}, "future", {"a": 1}, "ok"),
        ({"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": "{}"},
         {"output": [{"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": "x"}]},
         "mcp__files__read", {}, f"t\n{IMAGE}"),
    ],
)  # fmt: skip
def test_calls_of_any_type_and_their_results(
    call: dict[str, Any], output: dict[str, Any], name: str, arguments: dict[str, Any], shown: str
) -> None:
    answer = {"type": call["type"] + "_output", "call_id": "c1"} | output
    for between in ([], HI, [{"role": "assistant", "content": "wait"}]):
        sent = prompt_of("/v1/responses", {"input": [*HI, call | {"call_id": "c1"}, *between, answer]})
        assert json.dumps({"name": name, "arguments": arguments}) + f"<tool>{shown}" in sent


def test_an_item_that_has_to_be_looked_up_is_refused() -> None:
    body = {"input": [*HI, {"type": "item_reference", "id": "msg_1"}]}
    assert "input[1].type" in error_of(client_of().post("/v1/responses", body), 400)


# --- tools ------------------------------------------------------------------------------------------------------------
def calling(name: str, arguments: str) -> Client:
    """A client whose model calls a function."""
    client = client_of(HERMES)
    call = (f'<tool_call>\n{{"name": "{name}", "arguments": ', *arguments, "}\n</tool_call>")
    client.engine.script = Script(pieces=call)
    return client


def test_functions_in_namespaces() -> None:
    client = calling("mcp__files__read_file", '{"city": "Rome"}')
    body = {"input": "hi", "tools": [NAMESPACE, FUNCTION]}
    (item,) = client.post("/v1/responses", body).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files", "read_file")
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    prompt = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert (
        '"name": "mcp__files__read_file"' in prompt
        and "files of the user" in prompt
        and '"name": "read_file"' in prompt
    )
    events = client.events("/v1/responses", body)
    for kind in ("response.output_item.added", "response.output_item.done"):
        (event,) = [event for event in events if event["type"] == kind]
        assert (event["item"]["namespace"], event["item"]["name"]) == ("mcp__files", "read_file")
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (done["namespace"], done["name"]) == ("mcp__files", "read_file")
    assert events[-1]["response"]["output"][0]["namespace"] == "mcp__files"
    split = ClientTools({"tools": [NAMESPACE | {"name": "mcp__files__"}]})
    assert [tool["function"]["name"] for tool in split.chat()] == ["mcp__files__read_file"]
    assert split.qualified("gone", "mcp__files__") == "mcp__files__gone"
    replayed = [*HI, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}]
    sent = prompt_of("/v1/responses", {"input": replayed, "tools": [NAMESPACE]}, HERMES)
    assert '{"name": "mcp__files__read_file", "arguments": {"city": "Rome"}}' in sent
    plain = calling("read_file", "{}").post("/v1/responses", body).json()["output"][0]
    assert plain["name"] == "read_file" and "namespace" not in plain


def test_custom_tools_take_and_give_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tool = {"type": "custom", "name": "patch", "description": "edits", "format": grammar}
    for tools, namespace in (([tool], None), ([NAMESPACE | {"name": "ns", "tools": [tool]}], "ns")):
        name = "ns__patch" if namespace else "patch"
        client = calling(name, '{"input": "a \\"b\\"\\n"}')
        (item,) = client.post("/v1/responses", {"input": "hi", "tools": tools}).json()["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", 'a "b"\n')
        assert item.get("namespace") == namespace and item["call_id"] and "arguments" not in item
        prompt = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
        assert "edits" in prompt and "start: /x/" in prompt
        events = client.events("/v1/responses", {"input": "hi", "tools": tools})
        found = {event["type"]: event for event in events}
        assert found["response.output_item.added"]["item"]["type"] == "custom_tool_call"
        deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == found["response.custom_tool_call_input.done"]["input"] == 'a "b"\n'
        assert found["response.output_item.done"]["item"]["input"] == 'a "b"\n'
        assert not any("function_call" in kind for kind in found)


@pytest.mark.parametrize(
    ("kind", "arguments", "wanted"),
    [
        ("local_shell", {"command": ["ls", "-l"]}, {"action": {"type": "exec", "env": {}, "command": ["ls", "-l"]}}),
        ("shell", {"commands": ["ls"]}, {"action": {"commands": ["ls"]}}),
        ("apply_patch", {"type": "delete_file", "path": "p"}, {"operation": {"type": "delete_file", "path": "p"}}),
    ],
)
def test_tools_that_have_only_a_type(kind: str, arguments: dict[str, Any], wanted: dict[str, Any]) -> None:
    client = calling(kind, json.dumps(arguments))
    body = {"input": "hi", "tools": [{"type": kind}], "tool_choice": {"type": kind}}
    (item,) = client.post("/v1/responses", body).json()["output"]
    assert item["type"] == f"{kind}_call" and item["call_id"] and item["status"] == "completed"
    assert wanted.items() <= item.items() and "arguments" not in item
    assert f'"name": "{kind}"' in client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    events = client.events("/v1/responses", body)
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert wanted.items() <= done.items() and not any("arguments" in event["type"] for event in events)
    output = {"type": f"{kind}_call_output", "call_id": item["call_id"], "output": "done"}
    assert '"arguments": {' in prompt_of("/v1/responses", {"input": [*HI, item, output]})


def test_tools_that_the_conversation_brings() -> None:
    call = {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"goal": "files"}}
    found = {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [NAMESPACE]}
    more = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION | {"name": "write_file"}]}
    items = [*HI, call, found, more, {"role": "user", "content": "go"}]
    sent = prompt_of("/v1/responses", {"input": items, "tools": [{"type": "tool_search"}, NAMESPACE]})
    assert '"mcp__files__read_file"' in sent and '"write_file"' in sent
    assert '{"name": "tool_search", "arguments": {"goal": "files"}}<tool>' in sent and "mcp__files<user>go" in sent


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "web_search"}, {"type": "function", "name": "gone"}, {"type": "mcp", "server_label": "s"},
     {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}],
)  # fmt: skip
@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search"}], [NAMESPACE | {"tools": []}]])
def test_without_tools_none_can_be_required(tools: Any, choice: Any) -> None:
    client = client_of()
    message = error_of(client.post("/v1/responses", {"input": "hi", "tools": tools, "tool_choice": choice}), 400)
    assert message.startswith("tool_choice") and not client.engine.requests
    for free in ("auto", "none", None):
        body = {"input": "hi", "tools": tools, "tool_choice": free}
        assert client.post("/v1/responses", body).status_code == 200


@pytest.mark.parametrize(
    ("tools", "path"),
    [([{"type": "function"}], "tools[0].name"), ([NAMESPACE | {"name": None}], "tools[0].name"),
     ([NAMESPACE | {"tools": [{"type": "custom"}]}], "tools[0].tools[0].name"), ([5], "tools[0]"),
     ([FUNCTION, FUNCTION], "tools[1].name"), ([NAMESPACE, NAMESPACE], "tools[1].tools[0].name")],
)  # fmt: skip
def test_wrong_tools_of_responses_are_named(tools: Any, path: str) -> None:
    assert error_of(client_of().post("/v1/responses", {"input": "hi", "tools": tools}), 400).startswith(path)
    for odd in ({"type": []}, {"type": {}}, {"name": "x"}, {}):  # as those that are not known
        assert client_of().post("/v1/responses", {"input": "hi", "tools": [odd]}).status_code == 200


def test_choices_among_tools() -> None:
    tools = ClientTools({"tools": [NAMESPACE, FUNCTION, {"type": "custom", "name": "patch"}]})

    def chosen(choice: Any) -> Any:
        return tools.choice(choice)["tool_choice"]

    def named(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    assert chosen({"type": "function", "name": "read_file", "namespace": "mcp__files"}) == named(
        "mcp__files__read_file"
    )
    assert chosen({"type": "custom", "name": "patch"}) == named("patch")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__files"},
                                                                      {"type": "custom", "name": "patch"}]}  # fmt: skip
    wanted = {"mode": "required", "tools": [named("mcp__files__read_file"), named("patch")]}
    assert chosen(allowed) == {"type": "allowed_tools", "allowed_tools": wanted}
    sent = prompt_of("/v1/responses", {"input": "hi", "tools": [NAMESPACE, FUNCTION, WEATHER["function"] | FUNCTION | {
        "name": "patch"}], "tool_choice": allowed})  # fmt: skip
    assert "mcp__files__read_file" in sent and '"patch"' in sent and '"read_file"' not in sent


def test_allowed_tools_of_chat_completions() -> None:
    other = {"type": "function", "function": {"name": "time", "parameters": {}}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    body = {
        "messages": HI,
        "tools": [WEATHER, other],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    sent = prompt_of("/v1/chat/completions", body)
    assert '"time"' in sent and '"weather"' not in sent
    allowed |= {"mode": "required", "tools": []}
    assert "tool_choice.allowed_tools.tools" in error_of(client_of().post("/v1/chat/completions", body), 400)


def test_anthropic_tools_without_a_schema() -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"},
             {"type": "mcp_toolset", "mcp_server_name": "s"}, {"name": "plain"},
             {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]  # fmt: skip
    found = {tool["function"]["name"]: tool["function"] for tool in
             anthropic.to_chat({"messages": HI, "tools": tools})["tools"]}  # fmt: skip
    assert list(found) == ["bash", "plain", "str_replace_based_edit_tool"]
    assert found["bash"]["parameters"]["required"] == ["command"] and found["bash"]["description"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        body = {"messages": HI, "tools": tools[1:2], "tool_choice": choice}
        response = client_of().post("/v1/messages", body)
        assert response.status_code == 400 and "tool_choice" in response.json()["error"]["message"]


def test_converters_leave_their_input_alone() -> None:
    items = [*HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    messages = [*HI, ASSISTANT, {"role": "user", "content": [result([text("a")])]}]
    for convert, body in ((responses.to_chat, {"input": items, "tools": [NAMESPACE]}),
                          (anthropic.to_chat, {"messages": messages}),
                          (lambda body: ollama.to_chat(ollama.OllamaChatBody.checked(body)),
                           {"model": "m", "messages": HI})):  # fmt: skip
        before = json.dumps(body)
        convert(body)
        assert json.dumps(body) == before
