"""Chat requests: what is accepted, and which field an error names."""

from __future__ import annotations

from typing import Any

import pytest

from ikcli.chat import ChatDefaults, Message, RequestError, Tool, ToolCall, parse_messages, parse_request, parse_tools

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_content_forms() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "user", "content": parts}]) == (Message("user", "a\nb", ("a", "b")),)
    assert parse_messages([{"role": "developer", "content": "x"}])[0].role == "developer"
    assert parse_messages([{"role": "assistant", "content": None, "reasoning_content": "r"}])[0].reasoning == "r"


def test_tool_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    plain = {"id": "c2", "function": {"name": "g", "arguments": {"b": 2}}}
    messages = parse_messages(
        [
            USER,
            {"role": "assistant", "tool_calls": [call, plain]},
            {"role": "tool", "tool_call_id": "c2", "content": "r"},
        ]
    )
    assert messages[1].tool_calls == (ToolCall("f", '{"a": 1}', "c1"), ToolCall("g", '{"b": 2}', "c2"))
    assert messages[2].name == "g"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ([USER, 5], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "a b", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([USER, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"type": "x"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ],
)
def test_mistakes_in_messages_are_named(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(messages)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_image_input_is_refused_clearly() -> None:
    with pytest.raises(RequestError, match="image input is not supported"):
        parse_messages([{"role": "user", "content": [{"type": "image_url"}]}])


def test_tools() -> None:
    assert parse_tools(None) == ()
    assert parse_tools([TOOL]) == (Tool("f", "", {"type": "object"}),)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({}, "tools"),
        ([1], "tools[0]"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a\nb"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": 5}}], "tools[0].function.parameters"),
        ([TOOL, TOOL], "tools[1].function.name"),
    ],
)
def test_mistakes_in_tools_are_named(tools: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(tools)
    assert caught.value.field == field


def request(**body: Any) -> Any:
    return parse_request({"messages": [USER], **body})


def test_defaults() -> None:
    got = request()
    assert (got.tool_choice, got.json_schema, got.grammar, got.prefill, got.thinking) == ("auto", None, "", False, True)
    assert not parse_request({"messages": [USER]}, ChatDefaults(enable_thinking=False)).thinking


def test_tool_choice() -> None:
    assert request(tools=[TOOL], tool_choice="required").tool_choice == "required"
    named = request(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    assert (named.tool_choice, named.function) == ("required", "f")
    assert not request(tools=[TOOL], tool_choice="none").calls_tools


def test_answer_forms() -> None:
    assert request(response_format={"type": "json_object"}).json_schema == {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert request(response_format=wanted).json_schema == {"type": "array"}
    assert request(json_schema={"type": "null"}).json_schema == {"type": "null"}
    assert request(response_format={"type": "text"}).json_schema is None


def test_thinking_switches() -> None:
    assert request(chat_template_kwargs={"enable_thinking": False}).thinking is False
    assert request(reasoning_effort="none").thinking is False
    assert request(reasoning_effort="high").template_kwargs == {"reasoning_effort": "high"}
    assert request(reasoning_budget_tokens=0).thinking is False


def test_prefill() -> None:
    answer = {"role": "assistant", "content": "I"}
    assert parse_request({"messages": [USER, answer]}).prefill
    assert not parse_request({"messages": [USER, answer], "continue_final_message": False}).prefill
    assert not parse_request({"messages": [USER, answer]}, ChatDefaults(prefill_assistant=False)).prefill
    with pytest.raises(RequestError, match="2 or more assistant messages"):
        parse_request({"messages": [USER, answer, answer]})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": 5}, "json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_format": "odd"}, "reasoning_format"),
        ({"reasoning_effort": "two words"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": {"preserve_reasoning": 1}}, "chat_template_kwargs.preserve_reasoning"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_mistakes_in_requests_are_named(body: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        request(**body)
    assert caught.value.field == field


def test_messages_are_required() -> None:
    with pytest.raises(RequestError, match="messages: is required"):
        parse_request({})
