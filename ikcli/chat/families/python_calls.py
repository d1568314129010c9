"""Calls written as Python between markers.

LFM2 writes a list, `<|tool_call_start|>[name(key="value", other=1)]<|tool_call_end|>`, Olmo 3 a call per line between
`<function_calls>` and `</function_calls>`, MiniCPM 3 and 4 a call per line in a block of code.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ikcli.chat.families.base import (
    SPACE,
    CallSink,
    Family,
    Marker,
    Node,
    Repeat,
    Schema,
    any_of,
    calls_of,
    seq,
)
from ikcli.chat.families.schemas import parameters_of, with_definitions
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Wait

_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_TEXT = 100_000
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)\\/")
"""An escaped slash, which JSON knows and Python does not."""
_FENCE = re.compile(r"\A```(?:python)?\n(.*)\n```\Z", re.DOTALL)


class PythonCalls(Family):
    """Python calls between `open` and `close`: in `before` and `after`, with `between` from one to the next."""

    def __init__(
        self,
        name: str = "LFM2",
        open: str = "<|tool_call_start|>",
        close: str = "<|tool_call_end|>",
        *,
        before: str = "[",
        after: str = "]",
        between: str = ",",
    ) -> None:
        self.name = name
        self.openings = (open,)
        self.markers = (open, close)
        self._open, self._close, self._before, self._after, self._between = open, close, before, after, between

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose keyword arguments are JSON values that the schemas accept."""
        call = any_of(_call_tree(tool) for tool in tools)
        calls = calls_of(call, parallel, seq(self._between, SPACE) if self._between == "," else seq(self._between))
        around = [(part,) if part else () for part in (self._before, self._after)]
        return seq(Marker(self._open), *around[0], calls, *around[1], Marker(self._close))

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read the calls, whose end marker may be missing; a list of JSON objects is understood too."""
        text = ""
        found = None
        while found is None:  # the marker may also be in a string
            parts = [text]
            mark = yield from reader.until((self._close,), parts.append)
            text = "".join(parts)
            found = _parse(text)
            if found is None and mark is None:
                raise Malformed("call")
            text += self._close
        for name, arguments in found:
            out.begin_call(name)
            out.arguments(arguments)
            out.end_call()
        out.mark()


def _call_tree(tool: Tool) -> Node:
    found = parameters_of(tool.parameters)
    must: list[Node | str] = []
    may: list[Node] = []
    for key, schema in found.properties.items():
        argument = seq(f"{key}=", Schema(with_definitions(schema, tool.parameters), lenient=True))
        if key in found.required:
            must += [", ", argument] if must else [argument]
        else:
            may.append(argument)
    if may and must:
        must.append(Repeat(seq(", ", any_of(may)), 0, len(may)))
    elif may:
        must.append(Repeat(any_of(may), 0, len(may), seq(", ")))
    return seq(f"{tool.name}(", *must, ")")


def _parse(text: str) -> list[tuple[str, str]] | None:
    """Parse names and arguments; return None if the text is not complete Python yet."""
    if len(text) > _MAX_TEXT:
        raise Malformed("length")
    text = _FENCE.sub(r"\1", text.strip()).strip()
    if not text.endswith(("]", ")", "}")):
        return None
    try:
        lines = ast.parse(_SLASH.sub(r"\1/", text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    try:
        items = [item for line in lines for item in _items(line)]
        calls = [_one(item) for item in items]
        return [(name, json.dumps(values, ensure_ascii=False, allow_nan=False)) for name, values in calls]
    except (ValueError, RecursionError, MemoryError, TypeError):
        raise Malformed("call") from None


def _items(line: ast.stmt) -> list[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise Malformed("call")
    return line.value.elts if isinstance(line.value, ast.List) else [line.value]


def _one(item: ast.expr) -> tuple[str, dict[str, Any]]:
    if isinstance(item, ast.Dict):
        value = _value(item)
        if not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), Mapping):
            raise Malformed("call")
        return value["name"], value.get("arguments", {})
    if not isinstance(item, ast.Call) or item.args or any(k.arg is None for k in item.keywords):
        raise Malformed("call")
    return ast.unparse(item.func), {str(k.arg): _value(k.value) for k in item.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(e) for e in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in node.keys):
            raise Malformed("key")
        return {k.value: _value(v) for k, v in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
    value = ast.literal_eval(node)
    if isinstance(value, str):  # JSON writes large code points as two escapes
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    if not isinstance(value, int | float | bool | None):
        raise Malformed("value")
    return value
