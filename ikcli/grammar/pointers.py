"""Address places in a JSON document: paths, JSON pointers (RFC 6901) and anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

Path = tuple[str, ...]

NOTHING = object()
"""The value at a path that a document does not have."""


def pointer(text: str) -> Path:
    """Split a JSON pointer `#/...` into its parts."""
    return tuple(p.replace("~1", "/").replace("~0", "~") for p in unquote(text[2:]).split("/"))


def reference(path: Sequence[str]) -> str:
    """Return the `$ref` to a path."""
    return "#" + "".join("/" + quote(p.replace("~", "~0").replace("/", "~1"), safe="~$!*'()+,;=:@&") for p in path)


def anchored(root: Any, name: str) -> Path | None:
    """Return the path of the schema with an `$anchor`."""
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, Mapping):
            if part.get("$anchor") == name:
                return path
            waiting += (((*path, str(key)), value) for key, value in part.items())
        elif isinstance(part, list):
            waiting += (((*path, str(i)), value) for i, value in enumerate(part))
    return None


def pointer_text(path: Sequence[str]) -> str:
    """Format a path in a schema for messages."""
    return "#" + "".join("/" + part for part in path)[:300]


def at_path(schema: Any, path: Path) -> Any:
    """Return the part of a schema at a path, or NOTHING."""
    for part in path:
        if isinstance(schema, Mapping) and part in schema:
            schema = schema[part]
        elif isinstance(schema, list) and part.isdigit() and int(part) < len(schema):
            schema = schema[int(part)]
        else:
            return NOTHING
    return schema


def put_at(result: Any, path: Path, original: Any, schema: Any) -> None:
    """Set `schema` at `path`, making the objects and lists on the way."""
    for part, after in zip(path, (*path[1:], None), strict=True):
        index: Any = int(part) if isinstance(result, list) else part
        original = original[int(part)] if isinstance(original, list) else original[part]
        if not isinstance(result, dict | list):
            return  # its parent was left out
        if after is None:
            result[index] = schema
            return
        if isinstance(result, dict) and part not in result:
            result[part] = [{} for _ in original] if isinstance(original, list) else {}
        result = result[index]
