"""JSON schemas made ready for llguidance: keywords it would have to ignore are refused, with their place.

Keywords that no draft of JSON Schema defines, and `format`s it does not know, only annotate and are left out.
An object with `properties` has no others unless `additionalProperties` says so: what llama-server does, and what keeps
small models from making up names without end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ikcli.grammar.nodes import GrammarError

MAX_DEPTH = 100
MAX_SCHEMAS = 100_000
WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""Between the parts of a JSON value: none, a blank, or a line end and some indentation. Never without end."""

_ONE = frozenset({"additionalProperties", "additionalItems"})
_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PLAIN = frozenset(
    {
        "$ref",
        "const",
        "enum",
        "type",
        "minItems",
        "maxItems",
        "required",
        "minProperties",
        "maxProperties",
        "minLength",
        "maxLength",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "$anchor",
    }
)
_REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "$defs", "definitions"}
)
_TYPE_OF = {
    "object": frozenset({"properties", "patternProperties", "additionalProperties", "required"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
}
_TYPED = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{3})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {
    "time": f"^{_TIME}$",
    "date-time": f"^[0-9]{{4}}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T{_TIME}$",
}
"""Formats whose text could go on for ever (fractions of seconds)."""
_OPENING = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
_NOTHING = object()  # at a place that a schema does not have


def prepare_schema(schema: Any, *, lenient: bool = False) -> str:
    """The schema as llguidance takes it, serialized; GrammarError naming keyword and place if it cannot be followed.

    `schema` is a parsed JSON value. oneOf counts as anyOf. `lenient`: keywords that cannot be followed are left out.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        kind = "false, which no value fulfils" if schema is False else f"{type(schema).__name__}, not an object"
        raise GrammarError(f"json_schema: the schema is {kind}")
    prepared = _Preparer(schema, lenient).run()
    prepared["x-guidance"] = {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": True}
    return json.dumps(prepared)


class _Preparer:
    def __init__(self, root: Mapping[str, Any], lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._n = 0
        self._kept_whole: list[tuple[str, ...]] = []
        self._combined = _referred_by_all_of(root)

    def run(self) -> dict[str, Any]:
        result = self._schema(self._root, (), 0)
        assert isinstance(result, dict)
        # Targets of references outside of $defs and the like are not schemas to `_schema`: add them where they are.
        done: set[tuple[str, ...]] = set()
        while self._kept_whole:
            path = self._kept_whole.pop()
            if path in done:
                continue
            done.add(path)
            target = self._resolve(path)
            if _at(result, path) is _NOTHING:
                _put(result, path, self._root, self._schema(target, path, len(path)))
        return result

    def _schema(self, schema: Any, path: tuple[str, ...], depth: int) -> Any:
        self._n += 1
        if depth > MAX_DEPTH:
            raise self._error(path[:3], f"the schema is nested more than {MAX_DEPTH} deep")
        if self._n > MAX_SCHEMAS:
            raise GrammarError(f"json_schema: it has more than {MAX_SCHEMAS} parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error(path, f"a schema must be an object or true or false, not {_short(schema)}")
        result: dict[str, Any] = {}
        schema = self._merged(schema) or schema
        for key, value in schema.items():
            where = (*path, str(key))
            if key in _REFUSED:
                if not self._lenient and _says_something(key, value, schema):
                    raise self._error(where, f"the keyword {key} is not supported")
            elif key in _ONE or key == "items":
                if key == "items" and isinstance(value, list):
                    result[key] = self._list(value, where, depth)
                else:
                    result[key] = self._schema(value, where, depth + 1)
            elif key in _LIST:
                result[key] = self._list(value, where, depth)
            elif key in _MAP:
                if not isinstance(value, Mapping):
                    raise self._error(where, "must be an object of schemas")
                result[key] = {str(k): self._schema(v, (*where, str(k)), depth + 1) for k, v in value.items()}
            elif key in _PLAIN:
                result[key] = self._plain(key, value, where)
            elif key == "format" and isinstance(value, str):
                _add_format(result, value, schema)
            elif key == "$schema" and isinstance(value, str) and "json-schema.org/draft-0" in value:
                result[key] = value  # drafts 4 to 7 read some keywords in another way
        if not _TYPED & result.keys():
            kinds = [kind for kind, keywords in _TYPE_OF.items() if keywords & result.keys()]
            if len(kinds) == 1:
                result["type"] = kinds[0]
        _close_tuple(result, "json-schema.org/draft-0" in str(self._root.get("$schema", "")))
        if self._is_closed(result, path):
            result["additionalProperties"] = False
        return result

    def _merged(self, schema: Mapping[str, Any], depth: int = 0) -> dict[str, Any] | None:
        """One object for an allOf whose parts only name properties; None if this is nothing like that."""
        parts = schema.get("allOf", []) if depth == 0 or "allOf" in schema else None
        if depth > 8 or (depth == 0 and not parts):
            return None
        own = {key: value for key, value in schema.items() if key != "allOf"}
        out: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for part in [own, *(parts if isinstance(parts, list) else [])]:
            flat = self._plain_object(part, depth)
            if flat is None:
                return None
            for name, value in flat.get("properties", {}).items():
                if out["properties"].setdefault(name, value) != value:
                    return None
            out["required"] += [name for name in flat.get("required", []) if name not in out["required"]]
        return out | {key: own[key] for key in ("$defs", "definitions", "$schema") if depth == 0 and key in own}

    def _plain_object(self, part: Any, depth: int) -> Mapping[str, Any] | None:
        """A schema that only names properties, found through references."""
        self._n += 1
        if self._n > MAX_SCHEMAS:
            raise GrammarError(f"json_schema: it has more than {MAX_SCHEMAS} parts")
        for _ in range(8):
            if not isinstance(part, Mapping):
                return None
            target = part.get("$ref")
            if target is None or part.keys() - _ANNOTATIONS - {"$ref"}:
                break
            if not (isinstance(target, str) and target.startswith("#/")):
                return None
            part = self._resolve(_pointer(target), ("$ref",), target)
        if "allOf" in part:
            return self._merged(part, depth + 1)
        names, required = part.get("properties", {}), part.get("required", [])
        known = not part.keys() - _ANNOTATIONS - {"type", "properties", "required", "$schema"}
        plain = isinstance(names, Mapping) and isinstance(required, list) and part.get("type", "object") == "object"
        return part if known and plain else None

    def _is_closed(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> bool:
        """Whether only the named properties may be there. Not for parts of an allOf: others may name further ones."""
        names = schema.get("properties")
        if names is None or schema.get("type", "object") != "object" or _OPENING & schema.keys():
            return False
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) and name in names for name in required):
            return False
        if schema.get("minProperties", 0) > len(names):
            return False
        while len(path) >= 2 and path[-2] in _LIST and path not in self._combined:
            if path[-2] == "allOf":
                return False
            path = path[:-2]
        return path not in self._combined

    def _list(self, value: Any, where: tuple[str, ...], depth: int) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(where, "must be a list of schemas")
        return [self._schema(v, (*where, str(i)), depth + 1) for i, v in enumerate(value)]

    def _plain(self, key: str, value: Any, where: tuple[str, ...]) -> Any:
        if key == "$ref":
            return self._reference(value, where)
        if key == "type":
            for name in value if isinstance(value, list) else [value]:
                if not isinstance(name, str) or name not in _TYPES:
                    raise self._error(where, f"{_short(name)} is not a type; types are {', '.join(sorted(_TYPES))}")
        if key in _COUNTS and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            if not (isinstance(value, float) and value >= 0 and value == int(value)):
                raise self._error(where, f"must be a whole number of at least 0, not {_short(value)}")
            return int(value)
        if key == "pattern" and not isinstance(value, str):
            raise self._error(where, f"must be a regular expression, not {_short(value)}")
        if key == "enum" and (not isinstance(value, list) or not value):
            raise self._error(where, "must be a list of at least one value")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(where, f"must be a finite number, not {value}")
        return value

    def _reference(self, value: Any, where: tuple[str, ...]) -> str:
        if not isinstance(value, str):
            raise self._error(where, f"must be text, not {_short(value)}")
        identity = self._root.get("$id", self._root.get("id"))
        if isinstance(identity, str) and identity and value.startswith(identity.rstrip("#")):
            value = value[len(identity.rstrip("#")) :] or "#"
        if not value.startswith("#"):
            raise self._error(where, f"{_short(value)} refers to another document, which is not fetched")
        if value.startswith("#/"):
            path = _pointer(value)
            self._resolve(path, where, value)
            self._kept_whole.append(path)
        return value

    def _resolve(self, path: tuple[str, ...], where: tuple[str, ...] = (), written: str = "") -> Any:
        found = _at(self._root, path)
        if found is _NOTHING:
            raise self._error(where, f"{_short(written)} refers to something that is not in the schema")
        return found

    def _error(self, path: tuple[str, ...], message: str) -> GrammarError:
        return GrammarError(f"json_schema: at #{''.join('/' + p for p in path)[:300]}: {message}")


def _add_format(result: dict[str, Any], name: str, schema: Mapping[str, Any]) -> None:
    """Formats as patterns where the library's have no end; unknown ones only annotate."""
    if name in _PATTERNS:
        if "pattern" not in schema:
            result["pattern"] = _PATTERNS[name]
    elif name in _FORMATS:
        result["format"] = name
    elif len(name) == 5 and name[:4] == "uuid" and name[4] in "12345":
        result["format"] = "uuid"


def _close_tuple(result: dict[str, Any], has_draft: bool) -> None:
    """A list of item schemas stands for exactly these items, unless the schema says more."""
    if isinstance(result.get("items"), list) and not has_draft:
        result["prefixItems"] = result.pop("items")
        if "additionalItems" in result:
            result["items"] = result.pop("additionalItems")
    key, rest = ("items", "additionalItems") if isinstance(result.get("items"), list) else ("prefixItems", "items")
    if key in result and not {rest, "minItems", "maxItems"} & result.keys():
        result |= {rest: False, "minItems": len(result[key])}


def _referred_by_all_of(root: Any) -> frozenset[tuple[str, ...]]:
    """Places in the schema that an allOf refers to."""
    found: set[tuple[str, ...]] = set()
    todo = [root]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, Mapping):
            todo += part.values()
            branches = part.get("allOf")
            for branch in branches if isinstance(branches, list) else []:
                target = branch.get("$ref") if isinstance(branch, Mapping) else None
                if isinstance(target, str) and target.startswith("#/"):
                    found.add(_pointer(target))
    return frozenset(found)


def _pointer(text: str) -> tuple[str, ...]:
    """The parts of a JSON pointer `#/...`."""
    return tuple(p.replace("~1", "/").replace("~0", "~") for p in unquote(text[2:]).split("/"))


def _says_something(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "uniqueItems":
        return value is not False
    if key == "propertyNames":
        return value not in (True, {}, {"type": "string"})
    if key in ("then", "else"):
        return "if" in schema
    if key in ("minContains", "maxContains"):
        return "contains" in schema
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return value != {}
    return not (key.startswith("unevaluated") and value is True)


def _at(schema: Any, path: tuple[str, ...]) -> Any:
    """The part of a schema at a path, or _NOTHING."""
    for part in path:
        if isinstance(schema, Mapping) and part in schema:
            schema = schema[part]
        elif isinstance(schema, list) and part.isdigit() and int(part) < len(schema):
            schema = schema[int(part)]
        else:
            return _NOTHING
    return schema


def _put(result: Any, path: tuple[str, ...], original: Any, schema: Any) -> None:
    """Set `schema` at `path`, making the objects and lists on the way."""
    for part, after in zip(path, (*path[1:], None), strict=True):
        index: Any = int(part) if isinstance(result, list) else part
        original = original[int(part)] if isinstance(original, list) else original[part]
        if after is None:
            result[index] = schema
            return
        if isinstance(result, dict) and part not in result:
            result[part] = [{} for _ in original] if isinstance(original, list) else {}
        result = result[index]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
