"""Chat templates: `tokenizer.chat_template` rendered by Jinja2 in a sandbox, as model publishers expect it.

Blocks are trimmed, `break`/`continue` work, `tojson` does not escape HTML, `raise_exception` and `strftime_now` exist.
A template comes from a stranger's file: it cannot reach Python objects, and loops, repetition and output are limited.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from ikcli.errors import FormatError, IkError

MAX_OUTPUT = 16 << 20
"""Characters a rendered chat may have."""
MAX_STEPS = 1_000_000
"""Loop steps over `range` that one rendering may ask for."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """Compile `source`; FormatError with the line if it is not a valid template."""
        from jinja2 import TemplateError, TemplateSyntaxError

        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as e:
            raise FormatError(f"the chat template is broken at line {e.lineno}: {e.message}") from None
        except (TemplateError, RecursionError, ValueError) as e:
            raise FormatError(f"the chat template is broken: {e}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        **variables: Any,
    ) -> str:
        """The prompt for `messages` (`role`, `content`, ...); other `variables` are passed on to the template.

        IkError if the template fails, calls `raise_exception`, or asks for too much.
        """
        values = {
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "range": _Range(),
        }
        try:
            return _limited(self._template.generate(values))
        except IkError:
            raise
        except RecursionError:
            raise IkError("the chat template fails: it calls itself without end") from None
        except Exception as e:  # whatever a stranger's template provokes
            raise IkError(f"the chat template fails: {e or type(e).__name__}") from None


def _limited(parts: Iterable[str]) -> str:
    out, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_OUTPUT:
            raise IkError(f"the chat template writes more than {MAX_OUTPUT} characters")
        out.append(part)
    return "".join(out)


class _Range:
    """`range` with a budget for all its uses in one rendering."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def __call__(self, *args: int) -> range:
        steps = range(*args)
        if steps.stop - steps.start > MAX_STEPS or len(steps) > self._left:
            raise IkError(f"the chat template loops more than {MAX_STEPS} times")
        self._left -= len(steps)
        return steps


def _raise_exception(message: str) -> str:
    raise IkError(f"the chat template refuses the conversation: {message}")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Refuse `*` and `**` whose result would be huge."""
    if operator == "**":
        size = abs(right) * max(1, abs(left).bit_length()) if isinstance(left, int) and isinstance(right, int) else 0
    else:
        texts = [len(v) for v in (left, right) if isinstance(v, str | bytes | list | tuple)]
        counts = [v for v in (left, right) if isinstance(v, int)]
        size = texts[0] * counts[0] if texts and counts else 0
    if size > MAX_OUTPUT:
        raise IkError(f"the chat template asks for a value of {size} units")


@cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks what a model wrote; for prompts it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 (declared so by Jinja2)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation], autoescape=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
