"""Find the keyword for which a schema cannot be enforced, by leaving parts out.

Either the grammar library does not compile the schema, or every value that it describes is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ikcli.grammar.pointers import NOTHING, Path, at_path, pointer, reference
from ikcli.grammar.schema import MAPS, subschemas

ProblemOf = Callable[[Mapping[str, Any]], str]
"""Tells why a prepared schema cannot be enforced, or gives an empty text."""

MOST_TRIES = 1500
_SUSPECTS = (
    "pattern", "format", "multipleOf", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength",
    "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "required", "const", "enum", "$ref",
    "patternProperties", "allOf", "anyOf", "oneOf", "additionalProperties", "prefixItems", "items", "properties",
    "type",
)  # fmt: skip
"""Keywords in the order in which they are suspected."""


class TooManyError(Exception):
    """The search took too long."""


class Fault(NamedTuple):
    """A keyword, or a whole schema (`is_schema`), that has to go, and why."""

    path: Path
    is_schema: bool
    reason: str


class Faults:
    """Searches one prepared schema and removes what it finds."""

    def __init__(self, schema: dict[str, Any], problem_of: ProblemOf) -> None:
        self._schema = schema
        self._problem_of = problem_of
        self._left = MOST_TRIES
        self._cost = 1 + sum(1 for _ in _all(schema)) // 100
        self._good: set[Path] = set()  # places of schemas that compile

    def take_out(self) -> Iterator[Fault]:
        """Yield what has to go, one by one, already removed; at the end the schema compiles."""
        while reason := self._problem(()):
            fault = self._search((), reason, frozenset())
            if not fault.path:
                raise TooManyError
            _take_out(self._schema, fault.path, fault.is_schema)
            yield fault

    def _search(self, path: Path, reason: str, above: frozenset[Path]) -> Fault:
        """Find the keyword to blame for the problem of the schema at `path`."""
        schema = at_path(self._schema, path)
        if not isinstance(schema, dict):
            return Fault(path, True, reason)
        above |= {path}
        failing: list[tuple[Path, str]] = []
        for child in self._children(path, schema):
            if child in self._good or child in above:
                continue
            problem = self._problem(child)
            if not problem:
                self._good.add(child)
            elif not _is_impossible(problem):
                return self._search(child, problem, above)
            else:
                failing.append((child, problem))
        # A part that no value satisfies may be intended (a branch, an optional property): does the rest compile?
        for child, problem in failing:
            if not self._problem(path, Fault(child, True, "")):
                return self._search(child, problem, above)
        suspects = [key for key in _SUSPECTS if key in schema]
        for key in suspects:
            fault = Fault((*path, key), False, reason)
            if not self._problem(path, fault):
                return fault
        if failing:
            return self._search(*failing[0], above)
        return Fault((*path, suspects[0]), False, reason) if suspects else Fault(path, True, reason)

    def _children(self, path: Path, schema: Mapping[str, Any]) -> Iterator[Path]:
        for inner, one in subschemas(schema):
            closes = one is False and len(inner) == 1  # no further members are allowed
            if inner[0] not in ("$defs", "definitions") and not closes:
                yield (*path, *inner)
        target = _target(schema)
        if target is not None and at_path(self._schema, target) is not NOTHING:
            yield target

    def _problem(self, path: Path, without: Fault | None = None) -> str:
        """Return why the schema at `path` does not compile, or ""."""
        self._left -= self._cost
        if self._left < 0:
            raise TooManyError
        whole: Any = self._schema
        if without is not None:
            whole = _copied_along(whole, without.path[:-1])
            _take_out(whole, without.path, without.is_schema)
        if not path:
            return self._problem_of(whole)
        one = {"$ref": reference(("schema", *path)), "schema": _moved(whole, "schema")}
        return self._problem_of(one | {key: whole[key] for key in ("$schema",) if key in whole})


def has_end(root: Mapping[str, Any]) -> bool:
    """Return False if every value of a prepared schema would have to contain itself."""
    targets = {target for part in _all(root) if (target := _target(part)) is not None}
    ended: set[Path] = set()
    while new := {place for place in targets - ended if _ends(at_path(root, place), ended)}:
        ended |= new
    return _ends(root, ended)


def _ends(schema: Any, ended: set[Path]) -> bool:
    """Return whether some value is finite using only references in `ended`."""
    if not isinstance(schema, dict):
        return True  # the library reports `false` itself
    if "$ref" in schema and _target(schema) not in ended:
        return False
    if not all(_ends(part, ended) for part in schema.get("allOf", ())):
        return False
    if not all(any(_ends(part, ended) for part in schema[key]) for key in ("anyOf", "oneOf") if schema.get(key)):
        return False
    kinds = schema.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"const", "enum"} & schema.keys() or not kinds or set(kinds) - {"object", "array"}:
        return True
    return any(_object_ends(schema, ended) if kind == "object" else _array_ends(schema, ended) for kind in kinds)


def _object_ends(schema: Mapping[str, Any], ended: set[Path]) -> bool:
    named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(_ends(named.get(name, others), ended) for name in schema.get("required", ()))


def _array_ends(schema: Mapping[str, Any], ended: set[Path]) -> bool:
    first, rest, n = schema.get("prefixItems", ()), schema.get("items", True), schema.get("minItems", 0)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    return all(_ends(item, ended) for item in first[:n]) and (n <= len(first) or _ends(rest, ended))


def _target(schema: Any) -> Path | None:
    """Return the path that a schema refers to."""
    target = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(target, str):
        return None
    return () if target == "#" else pointer(target)


def _is_impossible(problem: str) -> bool:
    return "Unsatisfiable" in problem or "no text at all" in problem


def _take_out(root: Any, path: Path, is_schema: bool) -> None:
    """Remove a keyword; replace a schema by one that accepts everything."""
    holder = at_path(root, path[:-1])
    if is_schema:
        holder[int(path[-1]) if isinstance(holder, list) else path[-1]] = True
    else:
        del holder[path[-1]]


def _copied_along(part: Any, path: Path) -> Any:
    """Copy the schema along `path`, so that what is there can be changed."""
    copy: Any = part.copy()
    if path:
        index: Any = int(path[0]) if isinstance(part, list) else path[0]
        copy[index] = _copied_along(part[index], path[1:])
    return copy


def _moved(part: Any, under: str, names: bool = False) -> Any:
    """Rewrite the references of a schema (with `names`: of an object of them) for its place at `#/under`."""
    if isinstance(part, list):
        return [_moved(item, under) for item in part]
    if not isinstance(part, dict):
        return part
    copy: dict[str, Any] = {}
    for key, value in part.items():
        if not names and key in ("const", "enum"):
            copy[key] = value
        elif not names and key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            copy[key] = f"#/{under}{value[1:]}"
        else:
            copy[key] = _moved(value, under, not names and key in MAPS)
    return copy


def _all(schema: Any) -> Iterator[Any]:
    """Yield a prepared schema and everything in it, including reference targets outside `$defs`."""
    waiting = [schema]
    while waiting:
        top = waiting.pop()
        yield top
        if isinstance(top, dict | list):
            waiting += top.values() if isinstance(top, dict) else top
