"""Resolve the references and combinations of a parameter's schema to the types and texts that it allows.

Formats that write text without quotes must know whether a value is text or JSON before it is written or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

_ALL = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MOST_STEPS = 24
_MOST_DEPTH = 200  # schemas are refused long before
_REST = frozenset({"$defs", "definitions"})
_LEADS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
# Keywords that concern one type only; a schema with them but without `type` implies this type.
_OF_TYPE = {
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "object": frozenset({"properties", "patternProperties", "additionalProperties", "required"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The named parameters of a function, in order, and those that a call must have."""

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a schema allows: their types, and all of them if they are listed."""

    types: frozenset[str] = _ALL
    listed: tuple[Any, ...] | None = None

    @property
    def untyped(self) -> bool:
        """True if the schema does not constrain the type of a value."""
        return self.types == _ALL and self.listed is None

    @property
    def text(self) -> bool:
        """True if a value may be text."""
        return "string" in self.types

    def allows(self, value: Any) -> bool:
        """Return True if `value` has one of the types."""
        kind = type_of(value)
        return kind in self.types or (kind == "number" and value == int(value) and "integer" in self.types)


def type_of(value: Any) -> str:
    """Return the JSON type of a parsed value; whole numbers are integers."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def values_of(schema: Any, root: Mapping[str, Any]) -> Values:
    """Return the values that `schema`, a part of `root`, allows."""
    return _values(schema, root, _MOST_STEPS, {})


def _values(schema: Any, root: Mapping[str, Any], steps: int, known: dict[int, Values]) -> Values:
    """Return the values of `schema`; `known` caches them per schema, so that references stay linear."""
    if schema is False:
        return Values(frozenset(), ())
    if not isinstance(schema, Mapping) or steps <= 0:
        return Values()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = Values()  # for references to itself
    found = _own(schema)
    parts = schema.get("allOf")
    others = [_values(part, root, steps - 1, known) for part in (parts if isinstance(parts, list) else [])]
    if isinstance(schema.get("$ref"), str):
        others.append(_values(referred(schema["$ref"], root), root, steps - 1, known))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            others.append(_either([_values(option, root, steps - 1, known) for option in options]))
    for other in others:
        found = both(found, other)
    known[id(schema)] = found
    return found


def _own(schema: Mapping[str, Any]) -> Values:
    """Return the values that a schema's own keywords allow, leaving out those that refer to other schemas."""
    kinds = schema.get("type")
    names = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    types = frozenset(names) & _ALL
    if not types:
        implied = [
            kind for kind, keywords in _OF_TYPE.items() if keywords & schema.keys() and not _LEADS & schema.keys()
        ]
        types = frozenset(implied) if len(implied) == 1 else _ALL
    if "number" in types:
        types |= {"integer"}
    found = Values(types)
    if "const" in schema:
        found = both(found, _listing([schema["const"]]))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        found = both(found, _listing(schema["enum"]))
    if types == {"null"}:
        found = both(found, _listing([None]))
    return found


def _listing(values: list[Any]) -> Values:
    return Values(frozenset(type_of(value) for value in values), tuple(values))


def both(a: Values, b: Values) -> Values:
    """Return the values that both allow."""
    types = a.types & b.types
    if a.listed is None and b.listed is None:
        return Values(types)
    listed = a.listed if a.listed is not None else b.listed or ()
    other = Values(types, b.listed if a.listed is not None else None)
    kept = [v for v in listed if other.allows(v) and (other.listed is None or v in other.listed)]
    return Values(frozenset(type_of(v) for v in kept), tuple(kept))


def _either(options: list[Values]) -> Values:
    types = frozenset[str]().union(*(option.types for option in options))
    if any(option.listed is None for option in options):
        return Values(types)
    return Values(types, tuple(value for option in options for value in option.listed or ()))


def parameters_of(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Parameters:
    """Return the parameters that a schema in `root` names, through references and combinations too."""
    return _parameters(schema, schema if root is None else root, _MOST_STEPS, {})


def _parameters(schema: Any, root: Mapping[str, Any], steps: int, known: dict[int, Parameters]) -> Parameters:
    if not isinstance(schema, Mapping) or steps <= 0:
        return Parameters()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = Parameters()
    own, must = schema.get("properties"), schema.get("required")
    properties = dict(own) if isinstance(own, Mapping) else {}
    required = {name for name in must if isinstance(name, str)} if isinstance(must, list) else set()
    parts = schema.get("allOf")
    parts = list(parts) if isinstance(parts, list) else []
    if isinstance(schema.get("$ref"), str):
        parts.append(referred(schema["$ref"], root))
    for part in parts:
        found = _parameters(part, root, steps - 1, known)
        properties = dict(found.properties) | properties
        required |= found.required
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            alternatives = [_parameters(option, root, steps - 1, known) for option in options]
            for found in alternatives:
                properties = dict(found.properties) | properties
            required |= frozenset.intersection(*(found.required for found in alternatives))
    known[id(schema)] = Parameters(properties, frozenset(required & properties.keys()))
    return known[id(schema)]


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of `root` that a `$ref` points to; {} (anything) if it does not exist."""
    if not reference.startswith("#"):
        return {}
    found: Any = root
    for part in [unquote(p).replace("~1", "/").replace("~0", "~") for p in reference[1:].split("/")[1:]]:
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return {}
    return found


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema refers to within the parameters, or the schema itself; {} for references in a circle."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = referred(reference, root)
    return {}


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    """Return a parameter's schema as a standalone document, with the definitions it refers to."""
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    definitions = {key: root[key] for key in _REST if key in root and key not in schema}
    if all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references([schema, definitions])):
        return {**schema, **definitions}
    return {**_moved(schema), "$defs": {"parameters": _moved(root)}}


def _references(part: Any) -> list[str]:
    found: list[str] = []
    todo = [part]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, Mapping):
            todo += one.values()
            if isinstance(one.get("$ref"), str):
                found.append(one["$ref"])
    return found


def _moved(part: Any, depth: int = 0) -> Any:
    """Rewrite the references in `part` to point where `with_definitions` puts their targets."""
    if isinstance(part, list) and depth <= _MOST_DEPTH:
        return [_moved(one, depth + 1) for one in part]
    if not isinstance(part, Mapping) or depth > _MOST_DEPTH:
        return part
    out = {key: _moved(value, depth + 1) for key, value in part.items()}
    if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
        out["$ref"] = "#/$defs/parameters" + part["$ref"][1:]
    return out


__all__ = ["Parameters", "Values", "both", "parameters_of", "referred", "type_of", "values_of", "with_definitions"]
