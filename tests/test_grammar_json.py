"""JSON schemas, chat trees and lazy grammars: whatever a random model writes under them is what they ask for."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from test_grammar_gbnf import EOS, GRAMMARS, TOKENIZER, TOOL, allowed

from ikcli.grammar import GrammarError
from ikcli.grammar.grammars import ConstraintMaker, Grammars
from ikcli.grammar.spec import (
    Chars,
    Choice,
    GrammarKind,
    GrammarSpec,
    Literal,
    Marker,
    Node,
    Repeat,
    Schema,
    Sequence,
    Until,
)
from ikcli.sampling import Sampler, SamplerParams, SamplerVocab
from ikcli.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "ikcli" / "data" / "demo.gguf"


@cache
def demo() -> tuple[Tokenizer, Grammars]:
    fields = gguf.GGUFReader(DEMO).fields
    tokenizer = Tokenizer.from_metadata({name: field.contents() for name, field in fields.items()}, "demo.gguf")
    return tokenizer, Grammars(tokenizer)


def write(maker: ConstraintMaker, tokenizer: Tokenizer, seed: int, longest: int = 400) -> str | None:
    """What a model with random logits writes, or None if it does not come to an end. Ends are made likely."""
    rng = np.random.default_rng(seed)
    constraint = maker()
    sampler = Sampler(SamplerParams(seed=seed, top_k=0, min_p=0), SamplerVocab.from_tokenizer(tokenizer))
    logits = np.zeros(tokenizer.n_vocab, np.float32)
    endings = [i for i in range(tokenizer.n_vocab) if set(tokenizer.token_bytes(i)) & set(b'"}]')]
    ids: list[int] = []
    for _ in range(longest):
        logits[:] = rng.normal(size=len(logits)) * 2
        logits[endings] += 4
        logits[list(tokenizer.eog_ids)] += 4
        token = sampler.sample(logits, constraint.mask()).id
        if token in tokenizer.eog_ids:
            return b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        constraint.accept(token)
        ids.append(token)
        if constraint.finished:
            return b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    return None


def fits(value: Any, schema: Any, root: Any) -> bool:
    """Whether a value fulfils a schema, for the keywords the tests use."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return fits(value, target, root)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": (int, float)}
    kinds["integer"] = int
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    is_bool = isinstance(value, bool)
    right_type = not types or any(
        isinstance(value, kinds[t]) and (t == "boolean" or not is_bool)
        for t in types  # type: ignore[arg-type]
    )
    tests = [right_type, "const" not in schema or value == schema["const"], value in schema.get("enum", [value])]
    if isinstance(value, dict):
        tests += [name in value for name in schema.get("required", [])]
        rest = schema.get("additionalProperties", True)
        tests += [fits(v, schema.get("properties", {}).get(k, rest), root) for k, v in value.items()]
    if isinstance(value, list):
        tests += [fits(v, schema.get("items", True), root) for v in value]
        tests += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)]
    if isinstance(value, str):
        tests += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)]
        tests += [re.search(schema.get("pattern", ""), value) is not None]
    if isinstance(value, int | float) and not is_bool:
        tests += [schema.get("minimum", -1e300) <= value <= schema.get("maximum", 1e300)]
    tests += ["anyOf" not in schema or any(fits(value, s, root) for s in schema["anyOf"])]
    tests += [all(fits(value, s, root) for s in schema.get("allOf", []))]
    return all(tests)


SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 3, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": {"x": [1]}}]},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                    "v": {"type": "number"},
                },
                "required": ["left", "v"],
                "additionalProperties": False,
            }
        },
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$", "maxLength": 9},
    "all of": {
        "allOf": [{"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean"}}}, {"required": ["b"]}],
        "properties": {"b": {"type": "null"}},
    },
    "types": {"type": ["integer", "null"]},
    "annotated": {"type": "string", "maxLength": 5, "title": "x", "format": "odd", "nullable": True, "x-a": {"not": 1}},
    "pointer": {"properties": {"a": {"$ref": "#/components/A"}}, "required": ["a"], "type": "object",
                "additionalProperties": False, "components": {"A": {"type": "boolean", "example": 1}}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_random_model_follows_schemas(name: str) -> None:
    tokenizer, grammars = demo()
    maker = grammars.json_schema(SCHEMAS[name])
    done = 0
    for seed in range(12):
        text = write(maker, tokenizer, seed)
        if text is not None:
            assert fits(json.loads(text), SCHEMAS[name], SCHEMAS[name]), text
            done += 1
    assert done >= 4


def test_json_object_and_bounded_white_space() -> None:
    tokenizer, grammars = demo()
    texts = [t for seed in range(20) if (t := write(grammars.json_object(), tokenizer, seed)) is not None]
    assert len(texts) >= 4
    for text in texts:
        assert isinstance(json.loads(text), dict)
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert all(re.fullmatch(r" |\n{1,2}[ \t]{0,20}", gap) for gap in re.findall(r"\s+", outside))


def start(maker: ConstraintMaker, text: str) -> Any:
    constraint = maker()
    for byte in text.encode():
        constraint.accept(byte)
    return constraint


def test_layouts_that_people_use() -> None:
    maker = GRAMMARS.json_object()
    for text in ('{"a":1}', '{"a": 1, "b": [1, 2]}', '{\n  "a": 1,\n  "b": {\n    "c": null\n  }\n}', "{}"):
        assert start(maker, text).finished
    for text in ('{"a":1}\n', '{"a":\n\n\n1}', ' {"a":1}', "[1]"):
        with pytest.raises(GrammarError):
            start(maker, text)
    assert EOS in allowed(start(GRAMMARS.json_schema({}), "[1]").mask())
    assert start(GRAMMARS.json_schema(True), "null").finished


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"not": {"type": "null"}}}}, "at #/properties/a/not: the keyword not is not supported"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems"),
        ({"if": {}, "then": {}}, "keyword if"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"$defs": {"x": {"contains": {}}}}, "#/\\$defs/x/contains"),
        ({"$ref": "http://example.com/x"}, "another document"),
        ({"$ref": "other.json#/a"}, "another document"),
        ({"$ref": "#/$defs/missing"}, "not in the schema"),
        ({"$ref": "#nowhere"}, "json_schema: "),
        ({"$ref": 3}, "must be text"),
        ({"pattern": "("}, "unclosed group"),
        ({"pattern": "(?=a)"}, "look-around"),
        ({"pattern": 3}, "regular expression"),
        ({"type": "bogus"}, "is not a type"),
        ({"type": ["string", 3]}, "is not a type"),
        ({"type": {}}, "is not a type"),
        ({"type": ["string", {"type": "null"}]}, "is not a type"),
        ({"enum": []}, "at least one"),
        ({"enum": "a"}, "list"),
        ({"minItems": -1}, "whole number"),
        ({"type": "string", "minLength": "3"}, "whole number"),
        ({"anyOf": {}}, "list of schemas"),
        ({"properties": []}, "object of schemas"),
        ({"items": 3}, "must be an object or true or false"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"required": ["a"], "type": "object", "additionalProperties": False}, "unsatisfiable"),
        ({"$ref": "#"}, "no text at all"),
        ({"minimum": float("nan")}, "finite"),
        (False, "false"),
        ([1], "not an object"),
        ("x", "not an object"),
        (None, "not an object"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        GRAMMARS.json_schema(schema)


def test_schemas_with_keywords_that_say_nothing() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/thing",
        "type": "object",
        "properties": {"a": {"$ref": "https://example.com/thing#/$defs/n"}, "b": {"uniqueItems": False, "then": {}}},
        "$defs": {"n": {"type": "number", "deprecated": True}},
        "propertyNames": {"type": "string"},
        "unevaluatedProperties": True,
        "x-guidance": {"lenient": True, "whitespace_pattern": "x"},
    }
    assert start(GRAMMARS.json_schema(schema), '{"a": 3}').finished
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "maximum": 5}
    draft4["exclusiveMinimum"] = True
    assert allowed(GRAMMARS.json_schema(draft4)().mask()) == {ord("4"), ord("5")}


def test_hostile_schemas_end_soon() -> None:
    deep: Any = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nested more than"):
        GRAMMARS.json_schema(deep)
    with pytest.raises(GrammarError):
        GRAMMARS.json_schema({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(10)]})
    assert GRAMMARS.json_schema({"type": "string", "minLength": 10**9})().mask().any()
    assert GRAMMARS.json_schema({"type": "array", "minItems": 10**9})().mask().any()


def tree(node: Node, **options: Any) -> ConstraintMaker:
    return GRAMMARS.compile(GrammarSpec(GrammarKind.TREE, tree=node, **options))


CALL = Sequence(
    (
        Literal("<call>"),
        Chars((" ", "\n"), 0, 2),
        Choice((Sequence((Literal('{"n":1,"a":'), Schema({"type": "integer"}))), Literal('{"n":2'))),
        Literal("}"),
        Literal("</call>"),
    )
)


def test_trees() -> None:
    maker = tree(Repeat(CALL, 1, 2, Literal(";")))
    for text in ('<call>{"n":1,"a":12}</call>', '<call>\n{"n":2}</call>;<call>{"n":1,"a":3}</call>'):
        assert EOS in allowed(start(maker, text).mask())
    with pytest.raises(GrammarError):
        start(maker, '<call>{"n":1,"a":"x"}')
    thought = Sequence((Literal("<t>"), Until("</t>")))
    thinking = tree(Sequence((Repeat(thought, 0, 1), Chars((" ",), 0, 1), Literal("yes"))))
    for text in ("yes", "<t>a < b </ t></t>yes", "<t></t> yes"):
        assert allowed(start(thinking, text).mask()) == {EOS}
    until = tree(Until("aba"))
    assert allowed(start(until, "abxaba").mask()) == {EOS}
    with pytest.raises(GrammarError):
        start(until, "ababa")
    with pytest.raises(GrammarError):
        start(thinking, "<t>hm</t>no")
    assert allowed(tree(Repeat(Literal("a"), 0, 0, Literal(",")))().mask()) == {EOS}


def test_markers_may_be_control_tokens() -> None:
    maker = tree(Sequence((Marker("<tool>"), Literal("x"), Marker("[/]"))))
    constraint = maker()
    assert allowed(constraint.mask()) == {TOOL, ord("<")}
    constraint.accept(TOOL)
    assert allowed(constraint.mask()) == {ord("x")}
    assert start(maker, "<tool>x[/]").finished
    until = tree(Sequence((Until("<tool>"), Literal("end"))))()
    for byte in b"any < text":
        until.accept(byte)
    assert {TOOL, ord("e")} <= allowed(until.mask())
    until.accept(TOOL)
    assert allowed(until.mask()) == {ord("e")}


def test_characters() -> None:
    odd = ("09", "-", "]", "^", "\\", "é")
    maker = tree(Sequence((Chars(("az", "_")), Chars(odd, 0, 3), Chars((" ", "\n"), 2, 2))))
    for text in ("a \n", "_0-]  ", "z^\\é\n ", "m9  "):
        assert EOS in allowed(start(maker, text).mask())
    for text in ("A", "`", "a/", "a1234", "a1 x", "a1   "):
        with pytest.raises(GrammarError):
            start(maker, text)
    assert EOS not in allowed(start(maker, "a1 ").mask())


def test_lazy_grammars_wait_for_their_trigger() -> None:
    maker = tree(CALL, lazy=True, triggers=("<call>",))
    constraint = start(maker, "text with <cal and so on ")
    assert constraint.mask() is None and not constraint.finished
    for byte in b'<call>{"n":':
        constraint.accept(byte)
    assert allowed(constraint.mask()) == {ord("1"), ord("2")}
    for byte in b"2}</call>":
        constraint.accept(byte)
    assert constraint.finished and EOS in allowed(constraint.mask())


def test_a_trigger_may_begin_and_end_within_tokens() -> None:
    maker = GRAMMARS.gbnf('root ::= "bc" "the"? "x"', triggers=("bc",))
    constraint = maker()
    constraint.accept(next(i for i in range(TOKENIZER.n_vocab) if TOKENIZER.token_bytes(i) == b"abc"))
    assert {ord("x"), ord("t")} <= allowed(constraint.mask())
    control = tree(Sequence((Marker("<tool>"), Literal("x"))), lazy=True, triggers=("<tool>",))()
    control.accept(TOOL)
    assert allowed(control.mask()) == {ord("x")}


def test_text_that_breaks_the_grammar_in_the_token_of_its_trigger_stays_free() -> None:
    maker = GRAMMARS.gbnf('root ::= "b" "x"', triggers=("b",))
    constraint = maker()
    constraint.accept(next(i for i in range(TOKENIZER.n_vocab) if TOKENIZER.token_bytes(i) == b"abc"))
    assert constraint.mask() is None
    constraint.accept(ord("b"))
    assert allowed(constraint.mask()) == {ord("x")}


def test_grammars_after_thinking() -> None:
    maker = GRAMMARS.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, schema={"type": "null"}, after="</t>"))
    constraint = start(maker, "thoughts")
    assert constraint.mask() is None
    for byte in b"</t>":
        constraint.accept(byte)
    assert allowed(constraint.mask()) == {ord("n")}


def test_going_back_and_copies() -> None:
    for maker in (GRAMMARS.gbnf('root ::= "bx" [0-9]+'), GRAMMARS.gbnf('root ::= "bx" [0-9]+', triggers=("bx",))):
        constraint = start(maker, "bx12")
        other = constraint.copy()
        constraint.rollback(2)
        assert EOS not in allowed(constraint.mask()) and EOS in allowed(other.mask())
        constraint.accept(ord("7"))
        assert EOS in allowed(constraint.mask())
    lazy = start(maker, "ab bx1")
    lazy.rollback(2)
    assert lazy.mask() is None
    lazy.accept(ord("x"))
    assert ord("3") in allowed(lazy.mask())


def test_instances_do_not_disturb_each_other() -> None:
    maker = GRAMMARS.gbnf('root ::= "ab" | "cd"')
    one, other = maker(), maker()
    one.accept(ord("a"))
    other.accept(ord("c"))
    assert ord("b") in allowed(one.mask()) and ord("d") in allowed(other.mask())
    with pytest.raises(GrammarError):
        one.accept(ord("d"))
    other.accept(ord("d"))
    assert other.finished


def test_special_tokens_never_come_from_text() -> None:
    mask = allowed(GRAMMARS.gbnf("root ::= .*")().mask())
    assert TOOL not in mask and EOS in mask and ord("<") in mask
    with pytest.raises(GrammarError):
        GRAMMARS.gbnf('root ::= "<tool>"')().accept(TOOL)
