"""Run untrusted Jinja2 templates without access to Python objects and within bounded time and memory.

Jinja2's immutable sandbox blocks access to code but sets no limits. This environment counts every loop step and macro
call, charges every text or list to a budget before it is made or as it is made, and limits the processor time of a
rendering. Steps are inserted into the parsed template; operations are checked where they happen.

A deadline could not replace this: one operation such as `'a' * 10**10` fills the memory before another thread or a
trace function runs. A process with a memory limit could, but Windows has no RLIMIT_AS and macOS does not enforce it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ikcli.errors import IkError

MAX_OUTPUT = 16 << 20
"""Characters of a rendered chat, and of any text on the way to it."""
MAX_STEPS = 1_000_000
"""Loop steps and macro calls of one rendering; items of a value."""
MAX_TOTAL = 48 << 20
"""Characters (or bytes of lists) that one rendering may make, in addition to `PER_CHARACTER` of the chat."""
PER_CHARACTER = 32
ITEM = 32
"""Cost of a list item, in characters."""
MAX_SECONDS = 1.0
"""Processor time of one rendering."""
MAX_ITEMS = 300_000
"""Items of a nested value."""
MAX_NUMBER = 100_000
"""Largest width or count."""

_local = threading.local()
_NUMBERS = re.compile(r"[0-9]+")


class RenderBudget:
    """The remaining budget of one rendering; as a context manager it becomes the budget of the thread."""

    def __init__(self, characters: int = 0) -> None:
        """Start a budget for a chat of this many characters."""
        self._steps = MAX_STEPS
        self._units = MAX_TOTAL + PER_CHARACTER * characters
        self._calls = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def __enter__(self) -> RenderBudget:
        self._outer = getattr(_local, "budget", None)
        _local.budget = self
        return self

    def __exit__(self, *error: object) -> None:
        _local.budget = self._outer

    def step(self, n: int, units: int) -> None:
        """Charge `n` steps that may write `units` characters; raise IkError if that exceeds the budget."""
        self._steps -= n
        if self._steps < 0:
            raise IkError(f"the chat template loops more than {MAX_STEPS} times")
        self.spend(units)

    def spend(self, units: int) -> None:
        """Charge a value of `units` characters or items; raise IkError if that exceeds the budget or the time."""
        if units > MAX_OUTPUT:
            raise IkError(f"the chat template asks for a value of {units} units")
        self._units -= units
        if self._units < 0:
            raise IkError("the chat template makes too many large values")
        self._calls += 1
        if (units > 10_000 or self._calls % 64 == 0) and time.thread_time() > self._deadline:
            raise IkError(f"the chat template computes for more than {MAX_SECONDS:g} s")


def _budget() -> RenderBudget:
    found = getattr(_local, "budget", None)
    if found is None:
        raise IkError("a chat template runs outside a rendering")
    return found


def weigh(value: Any) -> Any:
    """Charge the result of an operation to the budget and return it."""
    if isinstance(value, str | bytes):
        if len(value) > 64:
            _budget().spend(len(value))
    elif isinstance(value, list | tuple | dict | set | frozenset):
        _budget().spend(len(value) * ITEM)
    elif isinstance(value, int) and value.bit_length() > MAX_NUMBER:
        raise IkError("the chat template computes with huge numbers")
    return value


def weigh_nested(value: Any) -> Any:
    """Charge a value that may nest others, with everything in it, and return it."""
    if isinstance(value, list | tuple | dict | set | frozenset):
        _size(value)
    return weigh(value)


def _size(value: Any) -> int:
    """Count characters and items of nested containers; shared ones count as often as they appear."""
    total, items, todo = 0, 0, [value]
    while todo:
        item = todo.pop()
        items += 1
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            todo.extend(item.keys())
            todo.extend(item.values())
            total += len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            todo.extend(item)
            total += len(item)
        if total > MAX_OUTPUT or items > MAX_ITEMS or len(todo) > MAX_STEPS:
            raise IkError("the chat template asks for a value that is too large")
    return total + items


class Range:
    """`range` with bounds; its items are counted where they are looped over."""

    def __call__(self, *args: int) -> range:
        """Return the range; raise IkError if it is too long."""
        steps = range(*args)
        if max(abs(steps.stop - steps.start), abs(steps.step)) > MAX_STEPS:
            raise IkError(f"the chat template loops more than {MAX_STEPS} times")
        _budget().spend(len(steps))
        return steps


# checks before an operation of what it would make


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        size = abs(right) * max(1, abs(left).bit_length()) if isinstance(left, int) and isinstance(right, int) else 0
        if size > MAX_NUMBER:
            raise IkError(f"the chat template asks for a value of {size} units")
    elif operator == "*":
        texts = [len(v) for v in (left, right) if isinstance(v, str | bytes | list | tuple)]
        counts = [v for v in (left, right) if isinstance(v, int)]
        if texts and counts:
            unit = 1 if isinstance(left, str | bytes) or isinstance(right, str | bytes) else 8
            _budget().spend(max(0, texts[0] * counts[0]) * unit)
        elif len(counts) == 2 and counts[0].bit_length() + counts[1].bit_length() > MAX_NUMBER:
            raise IkError("the chat template computes with huge numbers")
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(left, right)
    elif operator == "+" and isinstance(left, str | bytes | list | tuple) and isinstance(right, type(left)):
        _budget().spend(len(left) + len(right))


def _check_format(text: Any, *values: Any) -> None:
    text = str(text)
    widths = sum(int(digits) if len(digits) < 8 else MAX_TOTAL for digits in _NUMBERS.findall(text))
    if widths > MAX_OUTPUT or "*" in text or re.search(r":[^{}]*\{", text):
        raise IkError("the chat template formats with a width that is too large")
    _budget().spend(widths)
    for value in values:
        weigh_nested(value)
    # a format may name the same value many times
    fields = text.count("%") + text.count("{")
    _budget().spend(len(text) + fields * max([len(str(v)) for v in values] or [0]))


def _check_number(*values: Any) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise IkError(f"the chat template asks for a width or count of {value}")


def _check_replace(text: Any, old: Any = "", new: Any = "", *rest: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if old else len(text) + 1
        _budget().spend(len(text) + times * len(new))


def _check_join(separator: Any, items: Any) -> Any:
    """Return `items` as a list after charging the text that joining them makes."""
    if not isinstance(items, list | tuple | str | dict):
        items = list(items)
    _check_items(items)
    weigh_nested(items)
    made = sum(len(item) if isinstance(item, str) else 8 for item in items)
    _budget().spend(made + len(items) * (len(str(separator)) + 1))
    return items


def _check_items(value: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_ITEMS:
        raise IkError("the chat template takes a long text to pieces")


def _check_split(text: str, separator: Any = None, *rest: Any) -> None:
    marks = [separator] if isinstance(separator, str) and separator else [" ", "\n", "\t", "\r"]
    if sum(map(text.count, marks)) > MAX_ITEMS:
        raise IkError("the chat template takes a long text to pieces")
    _budget().spend(len(text))


_NUMBERED = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])
_FORBIDDEN = frozenset(
    ["translate", "maketrans", "to_bytes", "from_bytes", "encode", "decode", "fromkeys", "format_map"]
)


def _check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Check a call of a built-in method of a text, list or number; return its arguments."""
    method = getattr(method, "__wrapped__", method)  # the sandbox wraps `format`
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str | bytes | int | float | list | tuple | dict):
        return args
    if name in _FORBIDDEN:
        raise IkError(f"the chat template calls {name}, which chat templates may not")
    if isinstance(owner, list):
        for value in args:
            weigh_nested(value)
    if isinstance(owner, str):
        if name in _NUMBERED:
            _check_number(*args, *kwargs.values())
            _budget().spend(len(owner) * max([1, *(a for a in args if isinstance(a, int) and name == "expandtabs")]))
        elif name == "replace":
            _check_replace(owner, *args)
        elif name == "join" and args:
            args = (_check_join(owner, args[0]), *args[1:])
        elif name == "format":
            _check_format(owner, *args, *kwargs.values())
        elif name in ("split", "rsplit", "splitlines"):
            _check_split(owner, *(args or (kwargs.get("sep"),)))
        else:
            _budget().spend(len(owner))
    return args


# filters


_OF_TEXTS = frozenset([
    "trim", "upper", "lower", "capitalize", "title", "replace", "escape", "e", "forceescape", "urlencode", "string",
    "safe", "length", "count", "default", "d", "indent", "truncate", "first", "last", "format", "center", "wordcount",
    "int", "float", "tojson", "attr", "reverse",
])  # fmt: skip
"""Filters that keep a text whole; the others split it into characters, so long texts are refused there."""


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Jinja2 filter so that its arguments and its result are checked and charged."""
    first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    def call(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[first] if len(args) > first else None, args[first + 1 :]
        if name not in _OF_TEXTS:
            _check_items(value)
        if name in ("center", "indent", "batch", "slice", "truncate", "round"):
            _check_number(*rest, *kwargs.values())
            if name == "round" and any(isinstance(v, int) and v > 300 for v in (*rest, *kwargs.values())):
                raise IkError("the chat template rounds to too many digits")
            if name == "indent" and isinstance(value, str):
                width = rest[0] if rest else kwargs.get("width", 4)
                each = len(width) if isinstance(width, str) else int(width)
                _budget().spend((value.count("\n") + 1) * max(each, 1) + len(value))
        elif name == "replace":
            _check_replace(str(value), *rest)
        elif name == "join":
            args = (*args[:first], _check_join(rest[0] if rest else kwargs.get("d", ""), value), *rest)
        elif name == "format":
            _check_format(value, *rest, *kwargs.values())
        elif name == "sum" and any(isinstance(v, str | list | tuple) for v in (*rest[1:], kwargs.get("start"))):
            raise IkError("the chat template sums up what are no numbers")
        elif name in ("string", "safe", "int", "float"):
            weigh_nested(value)
        elif name in ("escape", "e", "forceescape", "urlencode"):
            weigh_nested(value)
            _budget().spend(6 * len(value) if isinstance(value, str) else 0)
        return weigh(function(*args, **kwargs))

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(call, mark, getattr(function, mark))
    return call


_REMOVED_FILTERS = ("urlize", "wordwrap", "striptags", "pprint", "xmlattr", "filesizeformat", "random")


def _raise_exception(message: str) -> str:
    raise IkError(f"the chat template refuses the conversation: {message}")


def _strftime_now(format: str) -> str:
    if re.search(r"%[^a-zA-Z%]*[0-9]{2,}", format) or len(format) > 1000:
        raise IkError("the chat template formats the time with a width")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    _check_number(width)
    if separators is not None and sum(map(len, separators)) > 16:
        raise IkError("the chat template asks for long separators")
    _budget().spend(_size(value) * (1 + width // 8))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote; for prompts it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the statements between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget; lists may grow (`append`), because every rendering has its own."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _insert_steps(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse underscores, internals and mutation, except `append` and `pop` of lists."""
        if isinstance(obj, list) and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an arithmetic operation after checking the size of its result."""
        _check_operation(operator, left, right)
        return weigh_nested(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call after checking the arguments, and charge the result."""
        if getattr(__obj, "__self__", None) is __self:
            return __obj(*args)
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        args = _check_method(__obj, args, given)
        charge = weigh_nested if __obj is dict else weigh
        return charge(super().call(__context, __obj, *args, **kwargs))

    def tick(self, units: int) -> str:
        """Charge one step of a loop or macro whose fixed text has `units` characters."""
        _budget().step(1, units)
        return ""

    def concatenate(self, *values: Any) -> str:
        """Apply the operator `~`."""
        for value in values:
            if not isinstance(value, str):
                weigh_nested(value)
        texts = [str(value) for value in values]
        _budget().spend(sum(map(len, texts)))
        return "".join(texts)

    def built(self, value: Any) -> Any:
        """Charge a list or mapping that the template writes, and return it."""
        return weigh_nested(value)


def _insert_steps(tree: nodes.Template) -> None:
    """Count loop steps and macro calls; check texts and lists where the template makes them."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        fixed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        tick = _environment_call("tick", [nodes.Const(fixed)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))  # type: ignore[attr-defined]
    _replace_makers(tree)


def _environment_call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), args, [], None, None, lineno=line)


def _replace_makers(node: nodes.Node) -> None:
    for field in node.fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            for i, child in enumerate(value):
                if isinstance(child, nodes.Node):
                    value[i] = _replaced(child)
        elif isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_makers(node)
    if isinstance(node, nodes.Concat):
        return _environment_call("concatenate", node.nodes, node.lineno)
    stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
    if isinstance(node, nodes.List | nodes.Dict | nodes.Tuple) and not stored:
        return _environment_call("built", [node], node.lineno)
    return node


@cache
def environment() -> Environment:
    """Return the environment that all templates share."""
    found = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        autoescape=False,
        optimized=False,
        finalize=weigh_nested,
    )
    for name in _REMOVED_FILTERS:
        del found.filters[name]
    found.globals.pop("lipsum", None)
    for name, function in list(found.filters.items()):
        found.filters[name] = _guarded(name, function)
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = _strftime_now
    return found
