"""Prepare JSON schemas for llguidance; keywords that it would ignore are refused, with their place.

For tools (`lenient`) such keywords are dropped one by one, so that a tool stays callable whatever its schema holds.
Keywords that no draft of JSON Schema defines, and unknown `format`s, only annotate and are dropped.
An object with `properties` has no others unless `additionalProperties` allows them. llama-server does the same, and it
keeps small models from inventing names without end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ikcli.grammar.nodes import GrammarError
from ikcli.grammar.numbers import BOUNDS, UnusableError, bound, check_literals, checked_number, shown
from ikcli.grammar.pointers import NOTHING, Path, anchored, at_path, pointer, pointer_text, put_at, reference

MAX_DEPTH = 100
MAX_SCHEMAS = 100_000
WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""White space between the parts of a JSON value: none, a blank, or a line end and some indentation. Always bounded."""

_ONE = frozenset({"additionalProperties", "additionalItems"})
_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
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
        "multipleOf",
    }
)
_REFUSED = frozenset(
    {
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
"""Formats whose text is unbounded (fractions of seconds)."""
_OPENING = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})


@dataclass(frozen=True, slots=True)
class Left:
    """A keyword that was left out: where, and why."""

    place: str
    reason: str


class KeywordError(GrammarError):
    """A keyword that cannot be enforced."""

    def __init__(self, path: Path, reason: str) -> None:
        self.left = Left(pointer_text(path), reason)
        super().__init__(f"json_schema: at {self.left.place}: {reason}")


def prepare_schema(schema: Any, *, lenient: bool = False) -> tuple[dict[str, Any], list[Left]]:
    """Prepare a schema for llguidance and list what was left out; raise KeywordError if it cannot be enforced.

    `schema` is a parsed JSON value. oneOf counts as anyOf. `lenient`: what cannot be followed is left out.
    """
    left: list[Left] = []
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        kind = "false, which no value fulfils" if schema is False else f"{type(schema).__name__}, not an object"
        raise GrammarError(f"json_schema: the schema is {kind}")
    preparer = _Preparer(schema, left if lenient else None)
    try:
        prepared = preparer.run()
    except GrammarError as e:
        if not lenient:
            raise
        left.append(e.left if isinstance(e, KeywordError) else Left("#", str(e)))
        prepared = unconstrained(schema)
    return prepared, left


def unconstrained(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a schema that cannot be enforced to its type."""
    kind = schema.get("type")
    return {"type": kind} if isinstance(kind, str) and kind in _TYPES else {}


def serialized(prepared: Mapping[str, Any]) -> str:
    """Serialize a prepared schema with the options of llguidance."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": True}
    return json.dumps({**prepared, "x-guidance": options})


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas directly within a prepared one, with their paths."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            yield from (((key, name), one) for name, one in value.items())
        elif isinstance(value, list) and (key in _LIST or key == "items"):
            yield from (((key, str(i)), one) for i, one in enumerate(value))
        elif key in _ONE or key == "items":
            yield (key,), value


class _Preparer:
    def __init__(self, root: Mapping[str, Any], left: list[Left] | None) -> None:
        self._root = root
        self._left = left  # None: nothing may be left out
        self._n = 0
        self._kept_whole: list[Path] = []
        self._combined = _referred_by_all_of(root)
        self._has_draft = "json-schema.org/draft-0" in str(root.get("$schema", ""))
        self._impossible: Path = ()  # path of a schema that no value satisfies

    def run(self) -> dict[str, Any]:
        result = self._schema(self._root, (), 0)
        if result is False:
            raise self._error(self._impossible, "no value fulfils it")
        assert isinstance(result, dict)
        # `_schema` does not visit reference targets outside $defs and the like: add them in place.
        done: set[Path] = set()
        while self._kept_whole:
            path = self._kept_whole.pop()
            if path in done:
                continue
            done.add(path)
            if at_path(result, path) is NOTHING:
                put_at(result, path, self._root, self._child(at_path(self._root, path), path, len(path)))
        return result

    def _schema(self, schema: Any, path: Path, depth: int) -> Any:
        """Prepare a schema: return an object, or False if no value can satisfy it."""
        self._n += 1
        if depth > MAX_DEPTH:
            raise self._error(path[:3], f"the schema is nested more than {MAX_DEPTH} deep")
        if self._n > MAX_SCHEMAS:
            raise GrammarError(f"json_schema: it has more than {MAX_SCHEMAS} parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error(path, f"a schema must be an object or true or false, not {shown(schema)}")
        result: dict[str, Any] = {}
        schema = self._merged(schema) or schema
        for key, value in schema.items():
            where = (*path, str(key))
            try:
                possible = self._keyword(result, key, value, schema, where, depth)
            except UnusableError as e:
                self._leave_out(self._error(where, str(e)))
                continue
            except KeywordError as e:
                self._leave_out(e)
                continue
            if not possible:
                self._impossible = where
                return False
        _add_format(result, schema.get("format"))
        if not _TYPED & result.keys():
            kinds = [kind for kind, keywords in _TYPE_OF.items() if keywords & result.keys()]
            if len(kinds) == 1:
                result["type"] = kinds[0]
        _close_tuple(result, self._has_draft)
        if self._is_closed(result, path):
            result["additionalProperties"] = False
        return result

    def _keyword(
        self,
        result: dict[str, Any],
        key: str,
        value: Any,
        schema: Mapping[str, Any],
        where: Path,
        depth: int,
    ) -> bool:
        """Add a keyword to `result`; return False if no value can satisfy it."""
        if key == "not":
            always = _truth(value)
            if always is None:
                raise self._error(where, "the keyword not is not supported")
            return not always
        if key in _REFUSED:
            if _says_something(key, value, schema):
                raise self._error(where, f"the keyword {key} is not supported")
        elif key in _ONE or key == "items":
            if key == "items" and isinstance(value, list):
                result[key] = self._list(value, where, depth)
            else:
                result[key] = self._schema(value, where, depth + 1)
        elif key in _LIST:
            result[key] = branches = self._list(value, where, depth)
            if key == "allOf":
                return False not in branches
            return key == "prefixItems" or not branches or any(branch is not False for branch in branches)
        elif key in MAPS:
            if not isinstance(value, Mapping):
                raise self._error(where, f"must be an object of schemas, not {shown(value)}")
            result[key] = {str(k): self._child(v, (*where, str(k)), depth + 1) for k, v in value.items()}
        elif key in BOUNDS:
            held = bound(key, value, schema.get("type"))
            if held is not None:
                result[key] = held
        elif key in _PLAIN:
            result[key] = self._plain(key, value, where)
        elif key == "$schema" and isinstance(value, str) and "json-schema.org/draft-0" in value:
            result[key] = value  # drafts 4 to 7 read some keywords differently
        return True

    def _child(self, schema: Any, path: Path, depth: int) -> Any:
        """Prepare one of several schemas; a value that is not a schema is left out on its own."""
        try:
            return self._schema(schema, path, depth)
        except KeywordError as e:
            self._leave_out(e)
            return True

    def _leave_out(self, error: KeywordError) -> None:
        if self._left is None:
            raise error
        self._left.append(error.left)

    def _merged(self, schema: Mapping[str, Any], depth: int = 0) -> dict[str, Any] | None:
        """Merge an allOf whose parts only name properties into one object; None if it has other parts."""
        parts = schema.get("allOf", [])
        if depth > 8 or not isinstance(parts, list) or (depth == 0 and not parts):
            return None
        own = {key: value for key, value in schema.items() if key != "allOf"}
        out: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for part in [own, *parts]:
            flat = self._plain_object(part, depth)
            if flat is None:
                return None
            for name, value in flat.get("properties", {}).items():
                if out["properties"].setdefault(name, value) != value:
                    return None
            out["required"] += [name for name in flat.get("required", []) if name not in out["required"]]
        return out | {key: own[key] for key in ("$defs", "definitions", "$schema") if depth == 0 and key in own}

    def _plain_object(self, part: Any, depth: int) -> Mapping[str, Any] | None:
        """Follow references to a schema that only names properties."""
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
            part = at_path(self._root, pointer(target))
        if not isinstance(part, Mapping):
            return None
        if "allOf" in part:
            return self._merged(part, depth + 1)
        names, required = part.get("properties", {}), part.get("required", [])
        known = not part.keys() - _ANNOTATIONS - {"type", "properties", "required", "$schema"}
        plain = isinstance(names, Mapping) and isinstance(required, list) and part.get("type", "object") == "object"
        return part if known and plain else None

    def _is_closed(self, schema: Mapping[str, Any], path: Path) -> bool:
        """Return whether only the named properties are allowed; not for parts of an allOf, whose siblings add some."""
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

    def _list(self, value: Any, where: Path, depth: int) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(where, f"must be a list of schemas, not {shown(value)}")
        return [self._child(v, (*where, str(i)), depth + 1) for i, v in enumerate(value)]

    def _plain(self, key: str, value: Any, where: Path) -> Any:
        if key == "$ref":
            return self._reference(value, where)
        if key == "type":
            for name in value if isinstance(value, list) else [value]:
                if not isinstance(name, str) or name not in _TYPES:
                    raise self._error(where, f"{shown(name)} is not a type; types are {', '.join(sorted(_TYPES))}")
        if key in _COUNTS and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            if not (isinstance(value, float) and value >= 0 and value == int(value)):
                raise self._error(where, f"must be a whole number of at least 0, not {shown(value)}")
            return int(value)
        if key == "pattern" and not isinstance(value, str):
            raise self._error(where, f"must be a regular expression, not {shown(value)}")
        if key == "enum" and (not isinstance(value, list) or not value):
            raise self._error(where, f"must be a list of at least one value, not {shown(value)}")
        if key in ("enum", "const"):
            check_literals(value)
        if key == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self._error(where, f"must be a list of names, not {shown(value)}")
        if key == "multipleOf" and checked_number(value) <= 0:
            raise self._error(where, f"must be greater than 0, not {value}")
        return value

    def _reference(self, value: Any, where: Path) -> str:
        if not isinstance(value, str):
            raise self._error(where, f"must be text, not {shown(value)}")
        identity = self._root.get("$id", self._root.get("id"))
        if isinstance(identity, str) and identity and value.startswith(identity.rstrip("#")):
            value = value[len(identity.rstrip("#")) :] or "#"
        if not value.startswith("#"):
            raise self._error(where, f"{shown(value)} refers to another document, which is not fetched")
        if value == "#":
            return value
        path = pointer(value) if value.startswith("#/") else anchored(self._root, value[1:])
        target = NOTHING if path is None else at_path(self._root, path)
        if path is None or not isinstance(target, Mapping | bool):
            what = "not in the schema" if target is NOTHING else f"no schema but {shown(target)}"
            raise self._error(where, f"{shown(value)} refers to something that is {what}")
        self._kept_whole.append(path)
        return reference(path)

    def _error(self, path: Path, message: str) -> KeywordError:
        return KeywordError(path, message)


def _add_format(result: dict[str, Any], name: Any) -> None:
    """Replace unbounded formats by patterns, beside the schema's own; unknown formats only annotate."""
    if not isinstance(name, str):
        return
    if name in _PATTERNS:
        if "pattern" in result:
            result["allOf"] = [*result.get("allOf", ()), {"type": "string", "pattern": _PATTERNS[name]}]
        else:
            result["pattern"] = _PATTERNS[name]
    elif name in _FORMATS:
        result["format"] = name
    elif len(name) == 5 and name[:4] == "uuid" and name[4] in "12345":
        result["format"] = "uuid"


def _close_tuple(result: dict[str, Any], has_draft: bool) -> None:
    """Make a list of item schemas stand for exactly these items, unless the schema says more."""
    if isinstance(result.get("items"), list) and not has_draft:
        result["prefixItems"] = result.pop("items")
        if "additionalItems" in result:
            result["items"] = result.pop("additionalItems")
    key, rest = ("items", "additionalItems") if isinstance(result.get("items"), list) else ("prefixItems", "items")
    if key in result and not {rest, "minItems", "maxItems"} & result.keys():
        result |= {rest: False, "minItems": len(result[key])}


def _referred_by_all_of(root: Any) -> frozenset[Path]:
    """Return the paths that an allOf refers to."""
    found: set[Path] = set()
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
                    found.add(pointer(target))
    return frozenset(found)


def _truth(schema: Any) -> bool | None:
    """Return True if all values satisfy a schema, False if none does, None if that is not obvious."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        return None
    keywords = schema.keys() - _ANNOTATIONS
    if not keywords:
        return True
    inner = _truth(schema["not"]) if "not" in keywords else None
    if inner:
        return False
    return True if inner is False and keywords == {"not"} else None


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
