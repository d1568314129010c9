"""Schemas of parameters, resolved: which are text without quotes, for the grammar and for the parser alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_chat_unescaped import FORMATS, by_format, parsed, written
from test_grammar_gbnf import GRAMMARS, check

from ikcli.chat.families.base import Family
from ikcli.chat.families.gemma import GemmaCalls
from ikcli.chat.families.python_calls import PythonCalls
from ikcli.chat.families.schemas import parameters_of, values_of, with_definitions
from ikcli.chat.families.signatures import signature
from ikcli.chat.families.xml_calls import DEEPSEEK_V3_2, QWEN3_CODER, Tags, XmlCalls
from ikcli.chat.messages import Tool
from ikcli.grammar.spec import GrammarKind, GrammarSpec

DEFINITIONS = {
    "$defs": {
        "Name": {"type": "string", "description": "a name"},
        "Alias": {"$ref": "#/$defs/Name"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Level": {"enum": ["low", "high"]},
        "Size": {"type": "integer"},
    },
    "definitions": {"Old/Name": {"type": "string"}},
}
TEXT: dict[str, Any] = {
    "plain": {"type": "string"},
    "nullable": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "nullable, other order": {"oneOf": [{"type": "null"}, {"type": "string", "minLength": 1}]},
    "list of types": {"type": ["string", "null"]},
    "reference": {"$ref": "#/$defs/Name"},
    "reference to a reference": {"$ref": "#/$defs/Alias", "default": "x"},
    "old definitions": {"$ref": "#/definitions/Old~1Name"},
    "reference to a parameter": {"$ref": "#/properties/other"},
    "all of": {"allOf": [{"$ref": "#/$defs/Name"}], "title": "x"},
    "all of several": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]},
    "any of references": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}], "default": None},
    "nested": {"anyOf": [{"anyOf": [{"type": "string"}]}, {"allOf": [{"type": "null"}]}]},
    "pattern": {"pattern": "^[0-9]+$"},
    "format": {"format": "date"},
}
ENUMERATED: dict[str, Any] = {
    "constant": {"const": "123"},
    "enum": {"enum": ["123", "low"]},
    "any of constants": {"anyOf": [{"const": "123"}, {"const": "b"}]},
    "nullable enum": {"anyOf": [{"enum": ["123"], "type": "string"}, {"type": "null"}]},
}
OTHERS: dict[str, tuple[Any, str, Any]] = {
    "number": ({"type": "number"}, "1.5", 1.5),
    "nullable number": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    "reference to a number": ({"$ref": "#/$defs/Size"}, "123", 123),
    "number or text": ({"type": ["string", "integer"]}, "123", 123),
    "number or text, text": ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a b", "a b"),
    "number or text, JSON": ({"type": ["string", "integer"]}, "[1]", "[1]"),
    "list or text": ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1, 2]", [1, 2]),
    "list or text, quoted": ({"anyOf": [{"type": "array"}, {"type": "string"}]}, '"a"', '"a"'),
    "texts and numbers": ({"enum": ["a", 1]}, "1", 1),
    "anything, text": ({"description": "what you like"}, "a b", "a b"),
    "anything, list": ({}, '["</x>"]', ["</x>"]),
    "no end": ({"$ref": "#/$defs/Loop"}, "a", "a"),
    "nowhere": ({"$ref": "#/$defs/None"}, "a", "a"),
}


def tool(schema: Any) -> Tool:
    properties = {"x": schema, "other": {"type": "string"}}
    return Tool("f", "", {"type": "object", "properties": properties, "required": ["x"], **DEFINITIONS})


def text_of(tags: Tags, value: str, *, text: bool = True) -> str:
    call = written(tags, ("f", {"x": value}))
    return call if text else call.replace('string="true"', 'string="false"')


def accepts(family: Family, one: Tool, text: str) -> bool:
    return check(GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=family.tree([one], False))), text)[1]


@by_format
@pytest.mark.parametrize("name", TEXT)
def test_text_stays_text(tags: Tags, name: str) -> None:
    one = tool(TEXT[name])
    for value in ("123", "a b", "true", '"quoted"', "nullify", "{", "a\nb" + tags.value_close):
        whole = text_of(tags, value)
        assert parsed(tags, list(whole), tools={"f": one.parameters}) == [("f", {"x": value})]
    assert accepts(XmlCalls(tags), one, text_of(tags, "123 b"))


@by_format
def test_null_for_a_text_that_may_be_null(tags: Tags) -> None:
    one, plain = tool(TEXT["nullable"]), tool(TEXT["plain"])
    whole = text_of(tags, "null", text=False)
    for pieces in ([whole], list(whole)):
        assert parsed(tags, pieces, tools={"f": one.parameters}) == [("f", {"x": None})]
    assert accepts(XmlCalls(tags), one, whole)
    assert parsed(tags, [text_of(tags, "null")], tools={"f": plain.parameters}) == [("f", {"x": "null"})]


@by_format
@pytest.mark.parametrize("name", ENUMERATED)
def test_listed_texts(tags: Tags, name: str) -> None:
    one = tool(ENUMERATED[name])
    assert parsed(tags, [text_of(tags, "123")], tools={"f": one.parameters}) == [("f", {"x": "123"})]
    assert accepts(XmlCalls(tags), one, text_of(tags, "123"))
    assert not accepts(XmlCalls(tags), one, text_of(tags, "124"))
    assert accepts(XmlCalls(tags), one, text_of(tags, "null", text=False)) == ("nullable" in name)


@pytest.mark.parametrize("tags", [t for t in FORMATS if not t.attribute], ids=lambda t: t.name)
@pytest.mark.parametrize("name", OTHERS)
def test_values_of_other_types(tags: Tags, name: str) -> None:
    schema, text, value = OTHERS[name]
    one = tool(schema)
    whole = text_of(tags, text)
    for pieces in ([whole], list(whole)):
        assert parsed(tags, pieces, tools={"f": one.parameters}) == [("f", {"x": value})]
    assert accepts(XmlCalls(tags), one, whole)


def test_an_attribute_that_tells_text_from_json() -> None:
    """DeepSeek says which of the two a value is; a schema that allows both leaves it the choice."""
    one = tool({"type": ["string", "integer"]})
    family = XmlCalls(DEEPSEEK_V3_2)
    for is_text, value in ((True, "123"), (False, 123)):
        whole = text_of(DEEPSEEK_V3_2, "123", text=is_text)
        assert parsed(DEEPSEEK_V3_2, [whole], tools={"f": one.parameters}) == [("f", {"x": value})]
        assert accepts(family, one, whole)
    assert not accepts(family, tool({"type": "string"}), text_of(DEEPSEEK_V3_2, "123", text=False))
    assert not accepts(family, tool({"type": "integer"}), text_of(DEEPSEEK_V3_2, "123"))


def test_other_families_resolve_schemas_too() -> None:
    for name in ("nullable", "reference", "all of", "reference to a parameter"):
        assert accepts(PythonCalls(), tool(TEXT[name]), '<|tool_call_start|>[f(x="a b")]<|tool_call_end|>')
        assert accepts(GemmaCalls(), tool(TEXT[name]), '<|tool_call>call:f{x:<|"|>a b<|"|>}<tool_call|>')
        if name != "nullable":
            assert not accepts(GemmaCalls(), tool(TEXT[name]), "<|tool_call>call:f{x:1}<tool_call|>")
    constant = tool({"anyOf": [{"const": "a"}, {"const": 2}]})
    for value, right in (('<|"|>a<|"|>', True), ("2", True), ('<|"|>b<|"|>', False), ("3", False)):
        assert accepts(GemmaCalls(), constant, f"<|tool_call>call:f{{x:{value}}}<tool_call|>") == right


def test_parameters_behind_references() -> None:
    parameters = {
        "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
        "$defs": {"Base": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "zzz"]}},
    }
    found = parameters_of(parameters)
    assert set(found.properties) == {"a", "b"} and found.required == {"a", "b"}
    whole = written(QWEN3_CODER, ("f", {"b": "1", "a": "2"}))
    assert parsed(QWEN3_CODER, [whole], tools={"f": parameters}) == [("f", {"b": 1, "a": "2"})]
    either = {"anyOf": [{"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}, {"properties": {"a": {}},
              "required": ["a"]}]}  # fmt: skip
    assert parameters_of(either).required == {"a"}
    for hostile in ({"properties": None, "required": None}, {"allOf": None, "anyOf": 3}, {"$ref": "#"}, {"$ref": "x"}):
        assert parameters_of(hostile).properties == {}


@pytest.mark.parametrize("schema", [{"$ref": "#/properties/other"}, {"items": {"$ref": "#/properties/x/items"}}])
def test_references_outside_of_definitions(schema: Any) -> None:
    root = {"type": "object", "properties": {"x": {"items": {"type": "integer"}}, "other": {"type": "integer"}}}
    alone = with_definitions(schema, root)
    maker = GRAMMARS.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, schema=alone))
    text = "12" if "$ref" in schema else "[12]"
    assert check(maker, text)[1] and not check(maker, json.dumps("a"))[0]


def test_hostile_references_end_soon() -> None:
    names = [f"d{i}" for i in range(30)]
    either = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names}
    assert values_of({"$ref": "#/$defs/d0"}, {"$defs": either}).untyped
    members = {name: {"properties": {other: {"$ref": f"#/$defs/{other}"} for other in names}} for name in names}
    root = {"$ref": "#/$defs/d0", "$defs": members}
    assert len(parameters_of(root).properties) == 30
    assert len(signature(Tool("f", "", root))) < 100_000
    deep: Any = {}
    for _ in range(400):
        deep = {"anyOf": [deep], "items": {"$ref": "#/x"}}
    assert values_of(deep, deep).untyped and isinstance(with_definitions(deep, deep), dict)


def test_signatures() -> None:
    """What the prompt says of a function where the template knows no tools: short, and nothing that matters lost."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "with\n its country"},
            "unit": {"enum": ["c", "f"], "default": "c"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "at": {"$ref": "#/$defs/Point"},
            "tags": {"type": "array", "items": {"type": ["string", "number"]}},
            "more": {},
        },
        "required": ["city", "at"],
        "$defs": {
            "Point": {
                "type": "object",
                "description": "where",
                "properties": {"x": {"type": "number", "description": "east"}, "next": {"$ref": "#/$defs/Point"}},
                "required": ["x"],
            }
        },
    }
    head, *notes = signature(Tool("get_weather", "Weather of a city. ", parameters)).splitlines()
    assert head.startswith(
        'get_weather(city: string, unit?: "c" | "f", days?: integer | null, at: {x: number, next?: {'
    )
    assert head.endswith("tags?: (string | number)[], more?: any): Weather of a city.")
    assert notes[:4] == ["- city: with its country", '- unit: (default "c")', "- at: where", "- at.x: east"]
    assert signature(Tool("clock")) == "clock()"


def test_types() -> None:
    assert values_of(True, {}).untyped and values_of({}, {}).untyped and values_of(3, {}).untyped
    assert values_of(False, {}).types == frozenset()
    assert values_of({"type": "number"}, {}).types == {"number", "integer"}
    assert values_of({"const": True}, {}).types == {"boolean"}
    assert values_of({"type": "integer"}, {}).allows(2.0) and not values_of({"type": "integer"}, {}).allows(2.5)
    assert not values_of({"type": "integer"}, {}).allows(True)
    both = values_of({"enum": ["a", "b", 1], "allOf": [{"enum": ["b", 1, "c"]}], "type": "string"}, {})
    assert both.listed == ("b",)
