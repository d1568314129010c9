"""Generated text to messages: every family's samples, any cutting of the text, constraints that the parsers read."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from chat_samples import FAMILIES, HERMES, NEMO, R7B, SAMPLES, SCHEMAS, THINK, TOOLS, Sample, draw
from hypothesis import given, settings
from hypothesis import strategies as st

from ikcli.chat import ChatDelta, ChatMessage, ChatParser, ParserSettings
from ikcli.chat.families.base import Family
from ikcli.chat.families.generic import Generic
from ikcli.chat.families.tagged import FunctionTag, KimiK2, MistralArgs
from ikcli.chat.reader import Reader, Wait


def parser(family: Family | None = None, **options: object) -> ChatParser:
    given_options = {"reasoning": THINK, "tools": SCHEMAS, **options}
    ids = itertools.count()
    return ChatParser(ParserSettings(family=family, **given_options), lambda: f"id{next(ids)}")  # type: ignore[arg-type]


def read(chat: ChatParser, pieces: list[str]) -> tuple[ChatMessage, list[ChatDelta]]:
    deltas = [delta for piece in pieces for delta in chat.feed(piece)]
    deltas += chat.flush()
    return chat.finish(), deltas


def added(deltas: list[ChatDelta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Content, reasoning, and id, name and arguments of the calls that a client puts together."""
    content, reasoning, calls = "", "", list[list[str]]()
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        if delta.index >= 0:
            if delta.name:
                assert delta.index == len(calls)
                calls.append([delta.id, delta.name, ""])
            calls[delta.index][2] += delta.arguments
    return content, reasoning, [(id, name, arguments) for id, name, arguments in calls]


def same(message: ChatMessage, deltas: list[ChatDelta]) -> bool:
    calls = [(c.id, c.name, c.arguments) for c in message.tool_calls]
    return added(deltas) == (message.content, message.reasoning, calls)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.family.name}: {s.text[:30]}")
def test_samples(sample: Sample, live: bool) -> None:
    message, deltas = read(parser(sample.family, live=live), [sample.text])
    assert message.content == sample.content
    assert message.reasoning == sample.reasoning
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == list(sample.calls)
    assert all(c.complete and c.id for c in message.tool_calls)
    assert same(message, deltas)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.family.name}: {s.text[:30]}")
def test_single_characters_give_the_same_message(sample: Sample, live: bool) -> None:
    whole, _ = read(parser(sample.family, live=live), [sample.text])
    message, deltas = read(parser(sample.family, live=live), list(sample.text))
    assert message == whole
    assert same(message, deltas)


_CALL = '{"name": "clock", "arguments": {'
_MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    _CALL,
    "}",
    "\n",
    " ",
    '"',
    "\\",
    "{",
    "[",
    ",",
    "é",
]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_cutting_of_any_text(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES))
    noise = data.draw(st.lists(st.sampled_from([*_MARKS, *sample.family.markers, *sample.family.openings]), max_size=6))
    text = sample.text
    for mark in noise:
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + mark + text[at:]
    text = text[: data.draw(st.integers(0, len(text)))]
    options = {
        "live": data.draw(st.booleans()),
        "thinking_forced_open": data.draw(st.booleans()),
        "reasoning_format": data.draw(st.sampled_from(["auto", "none", "deepseek-legacy"])),
    }
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole, deltas = read(parser(sample.family, **options), [text])
    assert same(whole, deltas)
    message, deltas = read(parser(sample.family, **options), pieces)
    assert message == whole
    assert same(message, deltas)
    for call in message.tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_what_the_constraint_allows_is_read_as_calls(family: Family, parallel: bool) -> None:
    rng = random.Random(5)
    tree = family.tree(TOOLS, parallel)
    for _ in range(30):
        text = draw(tree, rng)
        message, _ = read(parser(family), [text])
        assert message.tool_calls, text
        assert parallel or len(message.tool_calls) == 1
        assert message.content == "", text
        for call in message.tool_calls:
            assert call.name in SCHEMAS and call.complete
            arguments = json.loads(call.arguments)
            assert call.name == "clock" or isinstance(arguments["city"], str)


def test_arguments_are_passed_on_as_they_come() -> None:
    chat = parser(HERMES)
    chat.feed('<tool_call>{"name": "get_weather", "arguments": ')
    assert chat.feed('{"city": "Par') == [ChatDelta(index=0, id="id0", name="get_weather", arguments='{"city": "Par')]
    assert [d.to_openai() for d in chat.feed('is"}')] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": 'is"}'}}]}
    ]
    assert chat.feed("}</tool_call>") == []


def test_a_call_cut_off_keeps_what_there_is() -> None:
    message, _ = read(parser(HERMES), ['<tool_call>{"name": "get_weather", "arguments": {"city": "Par'])
    assert message.tool_calls[0].arguments == '{"city": "Par'
    assert not message.tool_calls[0].complete
    message, _ = read(parser(HERMES, live=False), ['<tool_call>{"name": "get_weather", "arguments": {"city": "Par'])
    assert message.content.startswith("<tool_call>")


def test_content_is_not_held_back_longer_than_needed() -> None:
    chat = parser(HERMES)
    assert chat.feed("Hello <") == [ChatDelta(content="Hello")]
    assert chat.feed("b> <tool_") == [ChatDelta(content=" <b>")]
    assert chat.flush() == [ChatDelta(content=" <tool_")]


@pytest.mark.parametrize(
    ("format", "forced", "content", "reasoning"),
    [
        ("auto", False, "answer", "thought"),
        ("deepseek", True, "answer", "thought"),
        ("none", False, "<think>\nthought\n</think>\n\nanswer", ""),
        ("none", True, "\nthought\n</think>\n\nanswer", ""),
        ("deepseek-legacy", False, "<think>thought</think>answer", "thought"),
        ("deepseek-legacy", True, "<think>thought</think>answer", "thought"),
    ],
)
def test_reasoning_formats(format: str, forced: bool, content: str, reasoning: str) -> None:
    text = ("" if forced else "<think>") + "\nthought\n</think>\n\nanswer"
    message, deltas = read(parser(reasoning_format=format, thinking_forced_open=forced, tools=None), list(text))
    assert (message.content, message.reasoning) == (content, reasoning)
    assert same(message, deltas)


def test_thinking_that_does_not_end() -> None:
    message, _ = read(parser(thinking_forced_open=True), ["on and on "])
    assert message == ChatMessage(reasoning="on and on ")


def test_without_tools_calls_are_content() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>'
    assert read(parser(HERMES, tools=None), [text])[0].content == text
    assert read(parser(Generic(), tools=None), ['{"response": 1}'])[0].content == '{"response": 1}'


def test_openai_form() -> None:
    message, _ = read(parser(HERMES), ['<think>a</think><tool_call>{"name": "clock"}</tool_call>'])
    call = {"type": "function", "id": "id0", "function": {"name": "clock", "arguments": "{}"}}
    expected = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "a"}
    assert message.to_openai() == expected
    assert ChatDelta(content="x").to_openai() == {"content": "x"}
    assert ChatDelta(reasoning="x").to_openai() == {"reasoning_content": "x"}


def test_long_answers_take_linear_time() -> None:
    chat = parser(HERMES)
    chat.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "')
    for _ in range(50_000):
        chat.feed("word ")
    chat.feed('"}}</tool_call>')
    assert len(chat.finish().tool_calls[0].arguments) == 250_012


IDS = (
    (NEMO, '[TOOL_CALLS][{"name": "clock", "id": "abcdefgh1", "arguments": {}}]', "abcdefgh1"),
    (R7B, '<|START_ACTION|>[{"tool_call_id": "7", "tool_name": "clock", "parameters": {}}]<|END_ACTION|>', "7"),
    (KimiK2(), "<|tool_call_begin|>functions.clock:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "functions.clock:3"),
    (MistralArgs(call_id=True), "[TOOL_CALLS]clock[CALL_ID]abcdefgh1[ARGS]{}", "abcdefgh1"),
)  # fmt: skip


@pytest.mark.parametrize(("family", "text", "id"), IDS, ids=lambda value: getattr(value, "name", None))
def test_identifiers_that_the_model_writes(family: Family, text: str, id: str) -> None:
    message, _ = read(parser(family), list(text))
    assert [(call.name, call.id) for call in message.tool_calls] == [("clock", id)]


@pytest.mark.parametrize("size", [1000, 9100])
@pytest.mark.parametrize("live", [True, False])
def test_a_long_call_that_breaks_off_is_kept_whole(live: bool, size: int) -> None:
    """Text that may turn out to be content is not forgotten, and positions stay right after what is."""
    before = "x" * 3000 + " "
    text = before * 3 + '<tool_call>{"name": "clock", "other": "' + "y" * 9000 + '", broken'
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    message, deltas = read(parser(HERMES, live=live), pieces)
    assert message.content == text and not message.tool_calls
    assert same(message, deltas)
    good = before * 3 + '<tool_call>{"name": "get_weather", "arguments": {"city": "' + "y" * 9000 + '"}}</tool_call>'
    message, deltas = read(parser(HERMES, live=live), [good[i : i + size] for i in range(0, len(good), size)])
    assert json.loads(message.tool_calls[0].arguments) == {"city": "y" * 9000} and same(message, deltas)


MALFORMED = (
    '{"city": "\\ud83dx"}',
    '{"city": "\\ud83d\\u0041"}',
    '{"city": "\\ud83d\\ue000"}',
    '{"city": "\\udc00"}',
    '{"city": "\\x"}',
    '{"city": "\\u12g4"}',
    '{"city": "a\nb"}',
    '{"city": 01}',
    '{"city": +1}',
    '{"city": nul}',
    '{"city" 1}',
    '{city: 1}',
    '{"city": ' + "[" * 202 + "]" * 202 + "}",
    '{"city": 1' + "0" * 5000 + "}",
    "7",
    '"[1]"',
)  # fmt: skip


@pytest.mark.parametrize("arguments", MALFORMED)
def test_arguments_that_are_no_json_are_content(arguments: str) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": ' + arguments + "}</tool_call>"
    for pieces in ([text], list(text)):
        message, _ = read(parser(HERMES, live=False), pieces)
        assert message.content == text and not message.tool_calls


def test_the_deepest_and_longest_values() -> None:
    value = '{"city": ' + "[" * 200 + "]" * 200 + ', "n": 1' + "0" * 3999 + "}"
    message, _ = read(parser(HERMES), ['<tool_call>{"name": "get_weather", "arguments": ' + value + "}</tool_call>"])
    assert message.tool_calls[0].arguments == value


@pytest.mark.parametrize("size", [256, 257])
def test_names_have_an_end(size: int) -> None:
    text = f'<function={"f" * size}>{{"a": 1}}</function>'
    for live in (True, False):
        message, _ = read(parser(FunctionTag(), live=live), [text])
        assert message.content == ("" if size == 256 else text)


def test_calls_in_openais_own_form() -> None:
    inner = '{"name": "clock", "arguments": {"a": "\\u00e9"}}'
    text = '<tool_call>{"type": "function", "function": ' + inner + "}</tool_call>"
    message, _ = read(parser(HERMES), list(text))
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("clock", {"a": "é"})]


@pytest.mark.parametrize(("family", "first"), [(NEMO, "name"), (R7B, "tool_call_id")], ids=["Nemo", "R7B"])
def test_keys_stand_as_the_model_was_taught(family: Family, first: str) -> None:
    text = draw(family.tree([TOOLS[1]], False), random.Random(1))
    assert re.findall(r'"(name|tool_call_id|tool_name)"', text)[0] == first


def test_the_longest_and_the_earliest_text_is_found() -> None:
    reader, found = Reader(), list[object]()

    def steps() -> Wait:
        found.append((yield from reader.one_of(("<a", "<ab>", "<abc"))))
        found.append((yield from reader.until((">", ">>", "x"), found.append)))
        found.append((yield from reader.one_of(("no", "end!"))))

    running = steps()
    for piece in ("<a", "b", ">1", ">", "> x", "en", "d"):
        reader.feed(piece)
        next(running, None)
    reader.ended = True
    next(running, None)
    assert found == ["<ab>", "1", ">>", None] and reader.text[reader.pos :] == " xend"
