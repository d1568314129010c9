"""Text arguments that nothing escapes: tags in them are text, for grammar and parser, however the text arrives."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_parser import parser, read, same
from test_grammar_gbnf import GRAMMARS, check

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


MAKERS = {(t.name, parallel): maker(*TOOLS, tags=t, parallel=parallel) for t in FORMATS for parallel in (False, True)}


def one(tags: Tags, name: str, arguments: dict[str, str]) -> str:
    """A call as the models' templates write it; texts as they are."""
    inner = ""
    for key, value in arguments.items():
        kind = ("" if key == "n" else "true") or "false"
        attribute = f' string="{kind}">' if tags.attribute else ""
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


def parsed(tags: Tags, text: str, pieces: list[str] | None = None, **options: Any) -> list[tuple[str, Any]]:
    """The calls that are read; nothing else may be."""
    message, deltas = read(parser(XmlCalls(tags), **{"tools": SCHEMAS, **options}), pieces or [text])
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
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_text_comes_back(tags: Tags, data: st.DataObject) -> None:
    marks = pieces_of(tags)
    text = st.lists(st.sampled_from(marks), max_size=7).map("".join)
    arguments = {"path": data.draw(text)}
    if data.draw(st.booleans()):
        arguments["n"] = "12"
    if data.draw(st.booleans()):
        arguments["text"] = data.draw(text)
    to_come = [key for key in ("n", "text") if key not in arguments or key in arguments]
    if not is_text(tags, arguments["path"], to_come):
        return
    left = ["n"] if "text" in arguments and "n" not in arguments else []
    if "text" in arguments and not is_text(tags, arguments["text"], ["n", *left]):
        return
    if tags.lines and any(value.startswith("\n") for value in arguments.values()):
        return
    calls: list[tuple[str, dict[str, str]]] = [("note", arguments)]
    parallel = data.draw(st.booleans())
    if parallel:
        calls.append(("clock", {}))
    whole = written(tags, *calls)
    expected = [(n, {k: int(v) if k == "n" else v for k, v in a.items()}) for n, a in calls]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=9)))
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    live = data.draw(st.booleans())
    assert parsed(tags, whole, live=live) == expected
    assert parsed(tags, whole, pieces, live=live) == expected
    assert parsed(tags, whole, list(whole), live=live) == expected
    assert check(MAKERS[tags.name, parallel], whole) == (True, True)
