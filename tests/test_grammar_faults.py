"""Schemas that cannot be followed: tools lose the keyword alone, answers are refused with its place; numbers."""

from __future__ import annotations

from typing import Any

import pytest
from test_grammar_gbnf import GRAMMARS, TOKENIZER, check

from ikcli.chat.families.base import arguments_schema
from ikcli.chat.messages import Tool
from ikcli.grammar import GrammarError
from ikcli.grammar.grammars import ConstraintMaker, Grammars
from ikcli.grammar.numbers import UnusableError, bound, most_digits
from ikcli.grammar.spec import Choice, GrammarKind, GrammarSpec, Literal, Schema, Sequence

END = 2**63


def complete(maker: ConstraintMaker, text: str) -> bool:
    return check(maker, text)[1]


def accepted(schema: Any, *texts: str) -> list[str]:
    """Those of the texts that are complete under a schema."""
    maker = GRAMMARS.json_schema(schema)
    return [text for text in texts if complete(maker, text)]


# Part of a schema, and where it is wrong.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "^(?!-)[a-z-]+$"}, "pattern"),
    ({"type": "string", "pattern": r"\bword\b"}, "pattern"),
    ({"pattern": r"(a)\1"}, "pattern"),
    ({"pattern": "a^b"}, "pattern"),
    ({"pattern": "("}, "pattern"),
    ({"pattern": None}, "pattern"),
    ({"type": "number", "minimum": -3.4e38}, "minimum"),
    ({"type": "number", "maximum": 3.4e38}, "maximum"),
    ({"type": "number", "exclusiveMaximum": 1.8e308}, "exclusiveMaximum"),
    ({"type": "integer", "minimum": -END}, "minimum"),
    ({"type": "integer", "exclusiveMinimum": -END - 1}, "exclusiveMinimum"),
    ({"type": "integer", "maximum": -END}, "maximum"),
    ({"type": "integer", "minimum": END}, "minimum"),
    ({"minimum": 10**400}, "minimum"),
    ({"minimum": "3"}, "minimum"),
    ({"maximum": None}, "maximum"),
    ({"type": "number", "minimum": 1e-300}, "minimum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": -2}, "multipleOf"),
    ({"multipleOf": None}, "multipleOf"),
    ({"type": "number", "multipleOf": 1e-300}, "multipleOf"),
    ({"const": -END}, "const"),
    ({"const": [{"a": 2**53 + 1}]}, "const"),
    ({"enum": ["a", 2**70]}, "enum"),
    ({"enum": None}, "enum"),
    ({"type": "string", "enum": [1]}, "enum"),
    ({"type": "object", "required": None}, "required"),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": "string", "required": True}, "required"),
    ({"type": "object", "properties": None}, "properties"),
    ({"type": "object", "properties": {"a": None}}, "properties/a"),
    ({"type": "object", "properties": {"const": {"pattern": "(?=a)"}}}, "properties/const/pattern"),
    ({"type": "object", "properties": {"properties": {"pattern": "(?=a)"}}}, "properties/properties/pattern"),
    ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, "properties/a"),
    ({"patternProperties": {"(?!a)": {}}}, "patternProperties"),
    ({"additionalProperties": None}, "additionalProperties"),
    ({"type": None}, "type"),
    ({"type": ["string", None]}, "type"),
    ({"anyOf": None}, "anyOf"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": [None]}, "anyOf/0"),
    ({"anyOf": [{"type": "null"}, {"items": {"pattern": "(?=a)"}}]}, "anyOf/1/items/pattern"),
    ({"allOf": {}}, "allOf"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "allOf"),
    ({"items": None}, "items"),
    ({"$ref": "https://example.com/x"}, "$ref"),
    ({"$ref": "#/$defs/missing"}, "$ref"),
    ({"$ref": "#missing"}, "$ref"),
    ({"$ref": "#/type"}, "$ref"),
    ({"$ref": "#"}, "$ref"),
    ({"$ref": "#/properties/p"}, "$ref"),
    ({"minLength": None}, "minLength"),
    ({"maxLength": 10**19}, "maxLength"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "string", "format": "uuid", "pattern": "^x$"}, "pattern"),
    ({"type": "string", "format": "date-time", "pattern": "^x$"}, "pattern"),
    ({"if": {}, "then": {}}, "if"),
    ({"not": {"type": "null"}}, "not"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({"contains": {}}, "contains"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
]


VALUES = ('"-"', "2", "7", "{}", "[]", "null", '{"a":1}', '"123e4567-e89b-12d3-a456-426614174000"',
          '"2026-01-02T10:20:30Z"')  # fmt: skip


def with_parameter(part: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"p": part, "q": {"type": "integer"}},
        "required": ["p", "q"],
        "$defs": {"word": {"type": "string", "pattern": "(?=x)"}, "fine": {"type": "null"}},
    }


def tools(reports: list[str], *parameters: Any) -> ConstraintMaker:
    """A choice between calls `0{...}`, `1{...}` of tools with these parameters."""
    grammars = Grammars(TOKENIZER, reports.append)
    grammars.__dict__["_vocabulary"] = GRAMMARS.prepare()
    calls = [
        Sequence((Literal(str(i)), arguments_schema(Tool(f"tool{i}", "", one)))) for i, one in enumerate(parameters)
    ]
    spec = GrammarSpec(GrammarKind.TREE, tree=Choice(tuple(calls)))
    grammars.compile(spec)
    return grammars.compile(spec)


@pytest.mark.parametrize(("part", "place"), BAD, ids=[f"{i} {place}" for i, (_, place) in enumerate(BAD)])
def test_what_cannot_be_followed_costs_a_tool_that_keyword_and_an_answer_400(part: Any, place: str) -> None:
    reports: list[str] = []
    other = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 1}}, "required": ["x"]}
    maker = tools(reports, with_parameter(part), other)
    assert complete(maker, '1{"x":"a"}') and not complete(maker, '1{"x":"ab"}')
    assert not complete(maker, '0{"p":null}') and not complete(maker, '0{"q":"a"}')
    assert any(complete(maker, f'0{{"p":{value},"q":3}}') for value in VALUES)
    first, *more = [line for line in reports if f"#/properties/p/{place} is not" in line]
    assert first.startswith("tool tool0: ") and not more  # once, although compiled twice
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.json_schema(with_parameter(part))
    assert str(refused.value).startswith(f"json_schema: at #/properties/p/{place}: ")


def test_only_the_keyword_is_lost() -> None:
    reports: list[str] = []
    part = {"type": "string", "pattern": "^(?!-)[a-z-]+$", "minLength": 2, "maxLength": 3}
    maker = tools(reports, {"properties": {"p": part, "r": {"type": "integer", "minimum": -END, "maximum": 9}}})
    assert [complete(maker, f'0{{"p":"{text}"}}') for text in ("a", "a!", "abc", "abcd")] == [False, True, True, False]
    assert [complete(maker, f'0{{"r":{n}}}') for n in (-5, 9, 10)] == [True, True, False]
    assert len(reports) == 2 and "'s #/properties/p/pattern is not enforced: look-around" in reports[1]


def test_what_was_said_is_not_said_again() -> None:
    reports: list[str] = []
    grammars = Grammars(TOKENIZER, reports.append)
    grammars.__dict__["_vocabulary"] = GRAMMARS.prepare()
    tool = arguments_schema(Tool("rename", "", with_parameter({"pattern": "(?=a)"})))
    for text in ("a", "b", "a"):  # grammars that differ in something else
        grammars.compile(GrammarSpec(GrammarKind.TREE, tree=Sequence((Literal(text), tool, tool))))
    assert len(reports) == 1 and reports[0].startswith("tool rename: the schema's #/properties/p/pattern ")


def test_definitions_are_blamed_where_they_are() -> None:
    reports: list[str] = []
    parameters = with_parameter({"$ref": "#/$defs/word"})
    assert complete(tools(reports, parameters), '0{"p":"anything","q":1}')
    assert not complete(tools(reports, parameters), '0{"p":1,"q":1}')
    assert "#/$defs/word/pattern" in reports[0]
    with pytest.raises(GrammarError, match=r"at #/\$defs/word/pattern: look-around"):
        GRAMMARS.json_schema(parameters)


def test_a_parameter_may_have_the_name_of_a_keyword() -> None:
    schema = {"type": "object", "properties": {"const": {"$ref": "#/$defs/word"}}, "required": ["const"]}
    with pytest.raises(GrammarError, match=r"at #/\$defs/word/pattern: look-around"):
        GRAMMARS.json_schema(with_parameter(None) | schema)


def test_the_least_integer_that_is_held() -> None:
    for value in (-END + 1, -END + 511):
        with pytest.raises(UnusableError, match="beyond what can be followed"):
            bound("minimum", value, "integer")
    assert bound("minimum", -END + 1024, "integer") == -END + 1024 == bound("minimum", -END + 1025, "integer")


def test_all_faults_of_a_tool_are_found() -> None:
    reports: list[str] = []
    names = [f"p{i}" for i in range(12)]
    parameters = {"properties": {name: {"type": "string", "pattern": "(?=x)"} for name in names}}
    assert complete(tools(reports, parameters), '0{"p0":"a","p11":"b"}')
    assert [name for name in names if any(f"/{name}/pattern" in line for line in reports)] == names


def test_a_tool_of_which_too_much_is_wrong_keeps_its_type() -> None:
    reports: list[str] = []
    parameters = {"properties": {f"p{i}": {"type": "string", "pattern": "(?=x)"} for i in range(900)}}
    maker = tools(reports, parameters, {"properties": {"x": {"type": "null"}}})
    assert complete(maker, '0{"anything":1}') and not complete(maker, "0[]") and not complete(maker, '1{"x":1}')
    assert len(reports) == 1 and "'s # is not enforced: look-around" in reports[0]


def test_schemas_without_end() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
    with pytest.raises(GrammarError, match="refers to itself on every path"):
        GRAMMARS.json_schema({"$ref": "#/$defs/n", "$defs": {"n": node}})
    for change in ({"required": []}, {"type": ["object", "null"]}):
        assert GRAMMARS.json_schema({"$ref": "#/$defs/n", "$defs": {"n": node | change}})
    either = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node | {"properties": {"next": either}}}}
    assert accepted(schema, '{"next":{"next":null}}', "null") == ['{"next":{"next":null}}']
    items = {"type": "array", "items": {"$ref": "#"}}
    assert accepted(items, "[[],[[]]]", "[1]") == ["[[],[[]]]"]
    with pytest.raises(GrammarError, match="at #/items/\\$ref: no text at all"):
        GRAMMARS.json_schema(items | {"minItems": 1})


def test_anchors_and_pointers() -> None:
    named = {"$defs": {"a/b c": {"$anchor": "here", "type": "null"}}}
    for target in ("#here", "#/$defs/a~1b%20c"):
        assert accepted({"$ref": target, **named}, "null", "1") == ["null"]


def test_impossible_branches_are_dropped() -> None:
    never: dict[str, Any] = {"not": {}}
    for key in ("anyOf", "oneOf"):
        assert accepted({key: [never, {"type": "integer"}]}, "3", '"a"', "null", "{}") == ["3"]
        assert accepted({key: [{"type": "string", "enum": [1]}, {"type": "null"}]}, "1", '"a"', "null") == ["null"]
        assert accepted({key: [False, {"type": "null", "const": 1}, {"const": 2}]}, "1", "2", "null") == ["2"]
        assert accepted({key: [{"allOf": [never, {}]}, {key: [never]}, {"const": 2}]}, "1", "2") == ["2"]
    for always in ({"not": {"not": {}}}, {"not": False}, {"not": {"not": True, "title": "t"}}):
        assert accepted({"type": "integer", **always}, "3", "null") == ["3"]
    assert accepted({"enum": ["a", 1, None], "type": ["string", "null"]}, '"a"', "1", "null") == ['"a"', "null"]
    assert accepted({"enum": [1, 2], "const": 2}, "1", "2") == ["2"]
    assert accepted({"enum": [1, 5], "minimum": 3}, "1", "5") == ["5"]
    closed = {"type": "object", "properties": {"a": never, "b": {}}}
    assert accepted(closed, "{}", '{"a":1}', '{"b":1}') == ["{}", '{"b":1}']
    assert accepted({"type": "array", "items": {"not": True}}, "[]", "[1]") == ["[]"]
    assert accepted({"type": "array", "prefixItems": [{}, never], "minItems": 0}, "[1]", "[1,2]") == ["[1]"]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "#/not"),
        ({"not": {"description": "anything"}}, "#/not"),
        ({"anyOf": [{"not": {}}, False]}, "#/anyOf"),
        ({"oneOf": [{"not": {}}]}, "#/oneOf"),
        ({"allOf": [{"not": {}}, {"type": "integer"}]}, "#/allOf"),
        ({"properties": {"a": {"anyOf": [{"not": {}}]}}, "required": ["a"]}, "#/properties/a"),
        ({"type": "array", "items": {"not": {}}, "minItems": 1}, "#/minItems"),
    ],
)
def test_nothing_possible_is_an_error(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.json_schema(schema)
    assert str(refused.value).startswith(f"json_schema: at {place}: ")


@pytest.mark.parametrize(
    ("format", "low", "high"),
    [
        ("int8", -(2**7), 2**7 - 1),
        ("uint8", 0, 2**8 - 1),
        ("int16", -(2**15), 2**15 - 1),
        ("int32", -(2**31), 2**31 - 1),
        ("uint32", 0, 2**32 - 1),
        ("int53", 1 - 2**53, 2**53 - 1),
        ("int64", 0, END - 1),
    ],
)
def test_ranges_of_integers_end_where_they_say(format: str, low: int, high: int) -> None:
    schema = {"type": "integer", "format": format, "minimum": low, "maximum": high}
    assert accepted(schema, *map(str, (low - 1, low, high, high + 1))) == [str(low), str(high)]
    schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
    if high < 2**53:
        assert accepted(schema, *map(str, (low, low + 1, high - 1, high))) == [str(low + 1), str(high - 1)]


def test_bounds_that_float64_does_not_hold_exclude_nothing() -> None:
    biggest = 2**64 - 1
    for schema in (
        {"type": "integer", "format": "uint64", "maximum": biggest},
        {"type": "integer", "minimum": 0, "maximum": biggest},
        {"type": "integer", "exclusiveMaximum": biggest + 1},
        {"type": ["integer", "null"], "maximum": float(biggest)},
        {"type": "object", "properties": {"n": {"type": "integer", "maximum": biggest}}, "required": ["n"]},
    ):
        around = ('{"n":', "}") if "properties" in schema else ("", "")
        texts = [f"{around[0]}{n}{around[1]}" for n in (biggest - 1, biggest, END, 5)]
        assert accepted(schema, *texts) == texts
        beyond = f"{around[0]}{10 * biggest}{around[1]}"  # more digits than the bound
        assert accepted(schema, beyond) == []
    assert accepted({"type": "integer", "minimum": 0, "maximum": biggest}, "-1", "0") == ["0"]
    for n in (2**53 + 1, 2**60 + 3, END - 1, END - 2):
        assert accepted({"type": "integer", "maximum": n}, str(n), str(n - 1)) == [str(n), str(n - 1)]
        least: dict[str, Any] = {"type": "integer", "maximum": END - 1}
        assert accepted(least | {"minimum": n}, str(n), "5") == [str(n)]
        assert accepted({"type": "integer", "exclusiveMaximum": n}, str(n - 1)) == [str(n - 1)]
        assert accepted(least | {"exclusiveMinimum": n - 1}, str(n), "5") == [str(n)]
    for n in (1 - 2**53, -(2**53) - 1, -(2**59) - 3):
        assert accepted({"type": "integer", "minimum": n}, str(n), str(n + 1), str(100 * n)) == [str(n), str(n + 1)]
        assert accepted({"type": "integer", "maximum": n}, str(n), str(n - 1), "5") == [str(n), str(n - 1)]
    assert accepted({"const": END - 1}, str(END - 1), str(END - 2)) == [str(END - 1)]
    assert accepted({"enum": [2**60, 1e-10, 10**30]}, str(2**60), "0.0000000001", str(10**30)) != []


@pytest.mark.parametrize(
    ("schema", "digits"),
    [
        ({"type": "integer"}, 16),
        ({"type": "integer", "maximum": 10**15}, 16),
        ({"type": "integer", "maximum": 10**17 - 1}, 17),
        ({"items": {"const": [{"a": -(10**18)}]}}, 19),
        ({"type": "integer", "format": "int64"}, 19),
        ({"type": "integer", "format": "uint64"}, 20),
        ({"type": "number", "maximum": 3.4e38}, 39),
        ({"const": 1e-20}, 20),
        ({"const": "12345678901234567890"}, 16),
        ({"minimum": float("nan"), "maximum": True}, 16),
    ],
)
def test_numbers_get_the_digits_that_their_schema_has(schema: Any, digits: int) -> None:
    assert most_digits(schema) == digits


def test_numbers_end_after_the_digits_of_their_schema() -> None:
    for n in (16, 20):
        schema: dict[str, Any] = {"type": "integer", "maximum": 10**n - 1} if n > 16 else {"type": "integer"}
        for spec in (
            GrammarSpec(GrammarKind.JSON_SCHEMA, schema=schema),
            GrammarSpec(GrammarKind.TREE, tree=Sequence((Literal("x"), Choice((Schema(schema), Literal("y")))))),
        ):
            text = ("" if spec.tree is None else "x") + "9" * n
            assert check(GRAMMARS.compile(spec), text) == (True, True)
            assert check(GRAMMARS.compile(spec), text + "9") == (False, False)


def test_format_and_pattern_both_hold() -> None:
    time, date_time = '"10:20:30Z"', '"2026-01-02T10:20:30Z"'
    for format, right, wrong in (
        ("time", time, '"23:20:30Z"'),
        ("date-time", date_time, '"2026-01-02T23:20:30Z"'),
        ("date", '"2026-10-02"', '"2026-12-02"'),
    ):
        both = {"type": "string", "format": format, "pattern": "10"}
        assert accepted(both, right, wrong, '"10"', '"x10:20:30Z"') == [right]
        assert accepted({"pattern": "10", "allOf": [{"format": format}]}, right, wrong, '"10"') == [right]
        assert accepted({"format": format, "allOf": [{"pattern": "10"}], "pattern": "0"}, right, wrong, '"10"') == [
            right
        ]
        assert accepted({"type": "string", "format": format}, right, wrong, '"10"') == [right, wrong]
    with pytest.raises(GrammarError, match="at #/pattern"):
        GRAMMARS.json_schema({"type": "string", "format": "time", "pattern": "x"})
    assert accepted({"type": "string", "format": "unknown", "pattern": "^a$"}, '"a"', '"b"') == ['"a"']
