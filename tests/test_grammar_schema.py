"""What schemas accept and refuse: closed objects, merged allOf, tuples, inferred types, keywords that say nothing."""

from __future__ import annotations

from typing import Any

import pytest
from test_grammar_faults import accepted

from ikcli.grammar.pointers import pointer, reference
from ikcli.grammar.schema import prepare_schema

INT: dict[str, Any] = {"type": "integer"}
NULL: dict[str, Any] = {"type": "null"}


def has(**properties: Any) -> dict[str, Any]:
    """An object that names properties, without a type."""
    return {"properties": properties}


# A schema, JSON texts that fulfil it, texts that do not.
TABLE: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "closed": (has(a=INT), ["{}", '{"a":1}'], ['{"b":1}', '{"a":null}', "1"]),
    "opened": (has(a=INT) | {"additionalProperties": NULL}, ['{"a":1,"b":null}', '{"b":null}'], ['{"b":1}']),
    "opened by what is required": (has(a=INT) | {"required": ["b"]}, ['{"b":[1]}', '{"a":1,"b":2}'], ["{}", '{"a":1}']),
    "opened by a count": (has(a=INT) | {"minProperties": 2, "required": ["a"]}, ['{"a":1,"b":2}'], ['{"a":1}']),
    "counted, closed": (has(a=INT) | {"minProperties": 1, "required": ["a"]}, ['{"a":1}'], ["{}", '{"a":1,"b":2}']),
    "opened by patterns": (has(a=INT) | {"patternProperties": {"^x": NULL}}, ['{"x1":null,"b":1}'], ['{"x1":1}']),
    "all of, merged": (
        {"allOf": [has(a=INT) | {"required": ["a"]}, has(b=NULL)]},
        ['{"a":1}', '{"a":1,"b":null}'],
        ["{}", '{"a":1,"c":1}', '{"b":null}'],
    ),
    "all of within all of": (
        {"allOf": [{"allOf": [has(a=INT), {"required": ["a"]}]}, has(b=NULL)], "required": ["b"]},
        ['{"a":1,"b":null}'],
        ['{"a":1}', '{"b":null}', '{"a":1,"b":null,"c":1}'],
    ),
    "all of by reference": (
        {"allOf": [{"$ref": "#/$defs/x"}, has(b=NULL)], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": has(a=INT)}},
        ['{"a":1,"b":null}', "{}"],
        ['{"c":1}', '{"a":null}'],
    ),
    "all of, one name twice": (
        {"allOf": [has(a=INT) | {"required": ["a"]}, has(a={"minimum": 3})]},
        ['{"a":3}'],
        ['{"a":2}', '{"a":3.5}', "{}"],
    ),
    "all of, more than names": (
        {"allOf": [has(a=INT) | {"type": "object", "required": ["a"], "minProperties": 1}, has(b=NULL)]},
        ['{"a":1,"b":null}'],
        ['{"b":null}', '{"a":1,"b":1}'],
    ),
    "all of, more than names, by reference": (
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"type": "object", "required": ["b"], "additionalProperties": True}],
            "$defs": {"x": has(a=INT) | {"required": ["a"]}},
        },
        ['{"a":1,"b":null}'],
        ['{"a":1}', '{"a":null,"b":1}'],
    ),
    "any of, each closed": ({"anyOf": [has(a=INT), has(b=NULL)]}, ['{"a":1}', '{"b":null}'], ['{"a":1,"b":null}']),
    "tuple": ({"prefixItems": [INT, NULL]}, ["[1,null]"], ["[1]", "[1,null,2]", "[null,1]", "1"]),
    "tuple with a count": ({"prefixItems": [INT, NULL], "minItems": 1}, ["[1]", "[1,null]", "[1,null,2]"], ["[]"]),
    "tuple with more": ({"prefixItems": [INT], "items": NULL}, ["[1]", "[1,null,null]"], ["[1,2]", "[null]"]),
    "tuple, old": ({"items": [INT, NULL]}, ["[1,null]"], ["[1]", "[1,null,2]"]),
    "tuple, old, with more": ({"items": [INT], "additionalItems": NULL}, ["[1]", "[1,null]"], ["[1,2]"]),
    "tuple, draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [INT], "additionalItems": NULL},
        ["[1]", "[1,null]"],
        ["[1,2]"],
    ),
    "array by its count": ({"minItems": 1, "maxItems": 2.0}, ["[1]", "[1,2]"], ["[]", "[1,2,3]", "1", '"a"']),
    "text by its length": ({"minLength": 2.0, "maxLength": 3}, ['"ab"', '"abc"'], ['"a"', '"abcd"', "1"]),
    "two kinds": ({"minLength": 2, "minItems": 1}, ['"ab"', "[1]", "5", "null"], ['"a"', "[]"]),
    "number bounds of any value": ({"minimum": 4}, ["4", "4.5", '"a"', "null"], ["3"]),
    "exclusive": (INT | {"exclusiveMinimum": 3, "exclusiveMaximum": 5}, ["4"], ["3", "5"]),
    "multiples": (INT | {"multipleOf": 3}, ["0", "3", "12"], ["4", "13"]),
    "multiples of a fraction": ({"type": "number", "multipleOf": 0.1}, ["0.3", "1"], ["0.25"]),
    "uuid5": ({"format": "uuid5"}, ['"123e4567-e89b-52d3-a456-426614174000"'], ['"123e4567"', "5"]),
    "uuid of a version that is none": ({"type": "string", "format": "uuid9"}, ['"x"'], ["5"]),
    "says nothing": (
        INT | {"then": {"type": "null"}, "else": False, "minContains": 2, "maxContains": 1, "dependentRequired": {},
               "unevaluatedItems": True, "propertyNames": True, "uniqueItems": False},
        ["5"],
        ["null"],
    ),
    "recursive": (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
        ["[]", "[[],[[]]]"],
        ["[1]", "{}"],
    ),
    "odd names": (
        {"properties": {"a/b": INT, "c~d": {"$ref": "#/properties/a~1b"}, 'e"': {"$ref": "#/properties/c~0d"}}},
        ['{"a/b":1,"c~d":2,"e\\"":3}'],
        ['{"c~d":null}', '{"e\\"":null}'],
    ),
    "names of keywords": (
        {"properties": {"const": INT, "$ref": NULL, "required": INT, "not": NULL}, "required": ["not"]},
        ['{"const":1,"$ref":null,"required":2,"not":null}', '{"not":null}'],
        ['{"const":null,"not":null}', "{}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_accepted_and_refused(name: str) -> None:
    schema, right, wrong = TABLE[name]
    assert accepted(schema, *right, *wrong) == right


def test_pointers_are_read_as_they_are_written() -> None:
    for path in (("a",), ("a/b", "~", "~1", "c d", "%41", "é"), ("",)):
        assert pointer(reference(path)) == path
    assert pointer("#/a~01/b~1c") == ("a~1", "b/c")


def test_an_endless_merge_ends() -> None:
    schema: dict[str, Any] = {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}}
    prepared, left = prepare_schema(schema)
    assert prepared["allOf"] and not left
