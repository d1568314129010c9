"""Text arguments that nothing escapes: tags in them are text, for grammar and parser, however the text arrives."""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from chat_samples import FAMILIES, HERMES, SAMPLES
from chat_samples import TOOLS as WEATHER_AND_CLOCK
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_parser import parser, read, same
from test_grammar_gbnf import GRAMMARS, TOOL, allowed, check

from ikcli.chat.families.base import Family
from ikcli.chat.families.gemma import GemmaCalls
from ikcli.chat.families.harmony import Harmony
from ikcli.chat.families.python_calls import PythonCalls
from ikcli.chat.families.tagged import Recipients
from ikcli.chat.families.xml_calls import (
    DEEPSEEK_V3_2,
    GLM_4_5,
    MINIMAX,
    QWEN3_CODER,
    SEED_OSS,
    Tags,
    XmlCalls,
)
from ikcli.chat.messages import Tool
from ikcli.grammar.grammars import ConstraintMaker
from ikcli.grammar.spec import GrammarKind, GrammarSpec

NOTE = Tool(
    "note",
    "",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "integer"}, "text": {"type": "string"}},
        "required": ["path"],
    },
)
CLOCK = Tool("clock", "", {"type": "object", "properties": {}})
TOOLS = (NOTE, CLOCK)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
FORMATS = (QWEN3_CODER, SEED_OSS, GLM_4_5, DEEPSEEK_V3_2, MINIMAX)
by_format = pytest.mark.parametrize("tags", FORMATS, ids=lambda t: t.name)


def maker(*tools: Tool, tags: Tags, parallel: bool = False) -> ConstraintMaker:
    return GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=XmlCalls(tags).tree(tools, parallel)))


@functools.cache
def maker_of(tags: Tags, parallel: bool) -> ConstraintMaker:
    """The constraint of both tools."""
    return maker(*TOOLS, tags=tags, parallel=parallel)


def one(tags: Tags, name: str, arguments: dict[str, str]) -> str:
    """A call as the models' templates write it; texts as they are."""
    inner = ""
    for key, value in arguments.items():
        attribute = f' string="{"false" if key == "n" else "true"}">' if tags.attribute else ""
        opening = f"{tags.key_open}{key}{tags.key_end}{attribute}"
        opening += f"\n{tags.value_open}" if tags.value_open else ""
        inner += f"{opening}{tags.value_lead}{value}{tags.value_lead}{tags.value_close}\n"
    head = f"{tags.call_open}{name}{tags.name_end}\n"
    return head + inner + tags.call_close + ("\n" if tags.call_close else "")


def written(tags: Tags, *calls: tuple[str, dict[str, str]]) -> str:
    """All calls, in one section or each in its own."""
    texts = [one(tags, *call) for call in calls]
    if tags.one_section:
        return f"{tags.open}\n{''.join(texts)}{tags.close}"
    lead = "\n" if tags.call_open else ""
    return "\n".join(f"{tags.open}{lead}{text}{tags.close}" for text in texts)


def parsed(tags: Tags, pieces: list[str], **options: Any) -> list[tuple[str, Any]]:
    """The calls that are read; nothing else may be."""
    message, deltas = read(parser(XmlCalls(tags), **{"tools": SCHEMAS, **options}), pieces)
    assert message.content == "", message.content
    assert same(message, deltas)
    assert all(call.complete for call in message.tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def ends(tags: Tags, keys: list[str]) -> str:
    """A regular expression for what ends a value before one of `keys`, or at the end of the call."""
    names = "|".join(re.escape(tags.key_open + key + tags.key_end) for key in keys)
    calls = rf"{re.escape(tags.call_open)}[^\s<>\"]+{re.escape(tags.name_end)}"
    last = re.escape(tags.close) + (f"|{calls}" if tags.one_section else "")
    end = rf"{re.escape(tags.call_close)}\s*(?:{last})" if tags.call_close else last
    return rf"{re.escape(tags.value_close)}\s*(?:{names or '(?!)'}|{end})"


def is_text(tags: Tags, value: str, keys: list[str]) -> bool:
    """True if nothing in `value` is an end: examples of whole calls are taken out first."""
    if tags.lines and value.startswith("\n"):  # taken for a line break of the format
        return False
    opening = rf"{re.escape(tags.call_open)}[^\s<>\"]+{re.escape(tags.name_end)}\s*{re.escape(tags.key_open)}"
    if not tags.call_open:
        opening = rf"{re.escape(tags.open)}\s*[^\s<>\"]+\s*{re.escape(tags.key_open)}"
    closing = rf"{re.escape(tags.value_close)}\s*{re.escape(tags.call_close or tags.close)}"
    while found := re.search(opening, value):
        if re.search(ends(tags, keys), value[: found.start()]):
            return False
        end = re.search(closing, value[found.end() :])
        if end is None:
            return False
        value = value[found.end() + end.end() :]
    return not re.search(ends(tags, keys), value)


def pieces_of(tags: Tags) -> list[str]:
    example = written(tags, ("note", {"path": "a", "n": "1", "text": "b"}))
    marks = [t for t in (tags.open, tags.close, tags.call_open, tags.name_end, tags.call_close, tags.key_open) if t]
    marks += [tags.key_end, tags.value_open, tags.value_close, f"{tags.key_open}x{tags.key_end}"]
    marks += [f"{tags.key_open}text{tags.key_end}", f"{tags.call_open}note{tags.name_end}", example]
    marks += [f"{tags.value_close}\n{tags.call_close}", f"{tags.value_close}\n{tags.key_open}"]
    return [*(m for m in marks if m), "\n", " ", "a", '"', "\\", "é", "<", ">", "</", "{", "null", "</think>", "\t"]


@by_format
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_text_comes_back(tags: Tags, data: st.DataObject) -> None:
    """Written out, a call is what the grammar allows, and is read as it was, however the text is cut."""
    text = st.lists(st.sampled_from(pieces_of(tags)), max_size=6).map("".join)
    path = data.draw(text.filter(lambda value: is_text(tags, value, ["n", "text"])))
    arguments = {"path": path} | ({"n": "12"} if data.draw(st.booleans()) else {})
    if data.draw(st.booleans()):
        arguments["text"] = data.draw(text.filter(lambda value: is_text(tags, value, ["n"])))
    parallel = data.draw(st.booleans())
    calls = [("note", arguments), *([("clock", dict[str, str]())] * parallel)]
    whole = written(tags, *calls)
    expected = [(name, {k: int(v) if k == "n" else v for k, v in values.items()}) for name, values in calls]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=9)))
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    live = data.draw(st.booleans())
    assert parsed(tags, pieces, live=live) == expected
    assert parsed(tags, list(whole), live=live) == expected
    assert check(maker_of(tags, parallel), whole) == (True, True)


@by_format
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_whatever_comes_the_cutting_does_not_matter(tags: Tags, data: st.DataObject) -> None:
    """Also where a text has ends in it, and where all text stops somewhere."""
    text = st.lists(st.sampled_from(pieces_of(tags)), max_size=8).map("".join)
    whole = written(tags, ("note", {"path": data.draw(text), "n": data.draw(text), "text": data.draw(text)}))
    whole = whole[: data.draw(st.integers(0, len(whole)))]
    message, deltas = read(parser(XmlCalls(tags), tools=SCHEMAS), [whole])
    assert read(parser(XmlCalls(tags), tools=SCHEMAS), list(whole))[0] == message
    assert same(message, deltas)
    for call in message.tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


def texts(tags: Tags) -> dict[str, str]:
    """Texts that people write about these formats."""
    close, end = tags.value_close, tags.call_close or tags.close
    return {
        "closing tag": f"a {close} b",
        "closing tag, line break": f"a\n{close}\nb",
        "closing tag at the end": f"a{close}",
        "only a closing tag": close,
        "end of a call": f"{close}\n{end} b" if tags.call_close else f"{end} b",
        "tag of the call": f"{tags.close}\n{tags.open}",
        "parameter of no function": f"a{close}\n{tags.key_open}other{tags.key_end}b",
        "parameter that is there": f"a{close}\n{tags.key_open}path{tags.key_end}b",
        "example": written(tags, ("note", {"path": "x", "n": "3", "text": "y"})) + "\nThat is it.",
        "two examples": (written(tags, ("note", {"path": "x"})) + "\n") * 2,
        "reasoning": "<think> </think>",
        "empty": "",
        "line breaks": "\n\na\n\n" if tags.value_lead else "a\n\n",
    }


@by_format
@pytest.mark.parametrize("name", texts(MINIMAX))
def test_tags_in_a_text(tags: Tags, name: str) -> None:
    text = texts(tags)[name]
    whole = written(tags, ("note", {"path": "p", "text": text}))
    expected = [("note", {"path": "p", "text": text})]
    assert parsed(tags, [whole]) == expected
    assert parsed(tags, list(whole)) == expected
    assert parsed(tags, [whole], live=False) == expected
    assert check(maker_of(tags, False), whole) == (True, True)


@by_format
def test_what_ends_a_text(tags: Tags) -> None:
    """A parameter that is still to come, and the end of the call: more the grammar does not forbid."""
    whole = written(tags, ("note", {"path": "p", "n": "1"}))
    assert parsed(tags, [whole]) == [("note", {"path": "p", "n": 1})]
    twice = whole.replace("p" + tags.value_lead, f"p{tags.value_lead}{whole[whole.index(tags.value_close) :]}", 1)
    assert not check(maker_of(tags, False), twice)[0]
    free = parser(XmlCalls(tags), tools=SCHEMAS)
    message, _ = read(free, [whole + "\n\nI wait."])
    assert message.content == "I wait." and len(message.tool_calls) == 1


@by_format
def test_a_parameter_after_an_example(tags: Tags) -> None:
    example = written(tags, ("note", {"path": "x", "n": "3"})) + "!"
    whole = written(tags, ("note", {"path": example, "n": "1", "text": example}))
    expected = [("note", {"path": example, "n": 1, "text": example})]
    assert parsed(tags, [whole]) == expected and parsed(tags, list(whole)) == expected
    assert check(maker_of(tags, False), whole) == (True, True)


@by_format
def test_what_was_left_out_may_still_come(tags: Tags) -> None:
    """The parser takes parameters in any order, so the grammar must not write one of them into a text."""
    inside = f"a{tags.value_close}\n{tags.key_open}n{tags.key_end}"
    whole = written(tags, ("note", {"path": "p", "text": inside}))
    assert not check(maker_of(tags, False), whole)[0]
    swapped = written(tags, ("note", {"path": "p", "text": "a", "n": "1"}))
    assert parsed(tags, [swapped]) == [("note", {"path": "p", "text": "a", "n": 1})]


def test_required_parameters_of_gemma() -> None:
    tree = GemmaCalls().tree([NOTE], False)
    maker = GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=tree))
    assert check(maker, '<|tool_call>call:note{n:1,path:<|"|>a<|"|>}<tool_call|>')[1]
    assert check(maker, '<|tool_call>call:note{path:<|"|>a<|"|>,text:<|"|>b<|"|>}<tool_call|>')[1]
    for missing in ("{}", "{n:1}", '{text:<|"|>b<|"|>}'):
        assert not check(maker, f"<|tool_call>call:note{missing}<tool_call|>")[0]


@by_format
def test_a_text_is_passed_on_as_it_comes(tags: Tags) -> None:
    chat = parser(XmlCalls(tags), tools=SCHEMAS)
    before, after = written(tags, ("note", {"path": "one @"})).split("@")
    got = "".join(delta.arguments for delta in chat.feed(before))
    assert got == '{"path": "one '
    got += "".join(delta.arguments for delta in chat.feed(f"two{tags.value_close} three"))
    assert json.loads(got + '"}') == {"path": f"one two{tags.value_close} three"}
    got += "".join(delta.arguments for delta in chat.feed(after))
    assert json.loads(got) == {"path": f"one two{tags.value_close} three"}


@by_format
def test_text_that_stops_within_a_closing_tag(tags: Tags) -> None:
    """What there is of the tags is neither text nor content."""
    whole = written(tags, ("note", {"path": "p"}))
    start = whole.index(tags.value_close) + len(tags.value_close)
    for size in range(start, len(whole)):
        message, _ = read(parser(XmlCalls(tags), tools=SCHEMAS), [whole[:size]])
        assert message.content == ""
        assert message.tool_calls[0].arguments.rstrip("}") == '{"path": "p"'


@by_format
def test_tags_in_the_texts_of_a_json_value(tags: Tags) -> None:
    listing = {"type": "object", "properties": {"list": {"type": "array"}, "n": {"type": "integer"}}}
    value = [{"a": f'"{tags.value_close}\n{tags.key_open}n{tags.key_end}'}, tags.value_close, "\u00e9"]
    call = written(tags, ("f", {"list": json.dumps(value), "n": "1"})).replace('"true"', '"false"')
    for pieces in ([call], list(call)):
        assert parsed(tags, pieces, tools={"f": listing}) == [("f", {"list": value, "n": 1})]
    broken = written(tags, ("f", {"list": '["a', "n": "1"})).replace('"true"', '"false"')
    assert parsed(tags, [broken], tools={"f": listing}) == [("f", {"list": '["a', "n": 1})]


def test_calls_without_their_wrapper() -> None:
    whole = one(QWEN3_CODER, "note", {"path": "a</parameter>b"}) * 2
    assert parsed(QWEN3_CODER, [whole]) == [("note", {"path": "a</parameter>b"})] * 2
    assert parsed(QWEN3_CODER, list(whole)) == [("note", {"path": "a</parameter>b"})] * 2


def test_markers_as_tokens() -> None:
    """Where the vocabulary has a tag as a control token, the token stands for it."""
    tags = replace(QWEN3_CODER, close="<tool>")
    tree = XmlCalls(tags).tree(TOOLS, False)
    constraint = GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=tree))()
    constraint.accept_text(written(tags, ("note", {"path": "a</parameter>\n</function>\nb"})).removesuffix("<tool>"))
    assert TOOL in allowed(constraint.mask())
    constraint.accept(TOOL)
    assert constraint.finished


FAMILY_TEXTS = (
    (Harmony(), "<|channel|>final<|message|>use <|end|> or <|start|> here", "use <|end|> or <|start|> here", "", {}),
    (Harmony(), "<|channel|>analysis<|message|>a <|end|> b<|end|><|start|>assistant<|channel|>final<|message|>c",
     "c", "a <|end|> b", {}),
    (Harmony(), '<|channel|>commentary to=functions.note<|message|>{"path": "<|end|><|start|>"}<|call|>', "", "",
     {"path": "<|end|><|start|>"}),
    (PythonCalls(), '<|tool_call_start|>[note(path="a <|tool_call_end|>\\ud83d\\ude00\\/")]<|tool_call_end|>', "",
     "", {"path": "a <|tool_call_end|>😀/"}),
    (PythonCalls(), '<|tool_call_start|>[note(path="a")]', "", "", {"path": "a"}),
    (GemmaCalls(), '<|tool_call>call:note{path:<|"|>a <|"|>b<|"|>, c<|"|>} d<|"|>,n:2}<tool_call|>', "", "",
     {"path": 'a <|"|>b<|"|>, c<|"|>} d', "n": 2}),
    (GemmaCalls(), '<|tool_call>call:note{path:[<|"|>a <|"|>] d<|"|>,<|"|>e<|"|>],x:{y:<|"|><|"|><|"|>}}<tool_call|>',
     "", "", {"path": ['a <|"|>] d', "e"], "x": {"y": '<|"|>'}}),
    (Recipients(), 'all\n>>> print(1)\n>>>note\n{"path": ">>>note\\n"}', ">>> print(1)", "", {"path": ">>>note\n"}),
    (HERMES, '<tool_call>{"name": "note", "arguments": {"path": "</tool_call><tool_call>{"}}</tool_ca', "", "",
     {"path": "</tool_call><tool_call>{"}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "reasoning", "arguments"), FAMILY_TEXTS)
def test_markers_in_texts_of_other_families(
    family: Family, text: str, content: str, reasoning: str, arguments: Any
) -> None:
    for pieces in ([text], list(text)):
        message, _ = read(parser(family, tools=SCHEMAS), pieces)
        assert (message.content, message.reasoning) == (content, reasoning)
        assert [json.loads(c.arguments) for c in message.tool_calls] == ([arguments] if arguments else [])
        assert all(call.complete for call in message.tool_calls)


@pytest.mark.parametrize(
    "name",
    ["dots", "Step 3", "MiniCPM 5", "Hunyuan 3", "Hunyuan 4", "Hunyuan", "MiniMax M3", "Kimi K3", "PLaMo 3", "Olmo 3"],
)
def test_what_models_write_is_what_the_constraint_allows(name: str) -> None:
    """The calls of the first sample with any, byte by byte; not without their end."""
    sample = next(s for s in SAMPLES if s.family.name == name and s.calls)
    family, text = sample.family, sample.text
    text = text[text.index(family.openings[0]) :]
    for wrapper in family.dropped:
        text = text.removesuffix(wrapper)
    found = GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=family.tree(WEATHER_AND_CLOCK, True)))
    assert check(found, text) == (True, True) and check(found, text[:-2]) == (True, False)


def test_nested_elements_follow_the_schema() -> None:
    """Lists, objects, listed values and text or null as elements (MiniMax M3)."""
    item = {"type": "object", "properties": {"b": {"type": "string"}, "c": {"type": "boolean"}}, "required": ["b"]}
    properties = {"a": {"type": "array", "items": item}, "e": {"enum": ["x", 7]}, "f": {"type": ["string", "null"]}}
    tool = Tool("other", "", {"type": "object", "properties": properties, "required": ["a"]})
    family = next(f for f in FAMILIES if f.name == "MiniMax M3")
    found = GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=family.tree([tool], False)))
    inner = "#<a>#<item>#<b>x </b>#</b>#<c>true#</c>#</item>#<item>#<b>#</b>#</item>#</a>#<e>7#</e>#<f>null#</f>"
    text = f'#<tool_call>#<invoke name="other">{inner}#</invoke>#</tool_call>'.replace("#", "]<]minimax[>[")
    assert check(found, text) == (True, True)
    assert not check(found, text.replace("true", "5"))[0] and not check(found, text.replace(">7", ">8"))[0]
    message, _ = read(parser(family, tools={"other": tool.parameters}), [text])
    wanted = {"a": [{"b": "x </b>", "c": True}, {"b": ""}], "e": 7, "f": None}
    assert [json.loads(c.arguments) for c in message.tool_calls] == [wanted]
