"""Render chat templates (`tokenizer.chat_template`) with Jinja2 in a sandbox, as model publishers expect.

Blocks are trimmed, `break`/`continue` work, `tojson` does not escape HTML, `raise_exception` and `strftime_now` exist.
A template comes from an untrusted file: it cannot reach Python objects, and its time and memory are limited
(`ikcli.chat.sandbox`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ikcli.errors import FormatError, IkError

MAX_SOURCE = 4 << 20
"""Characters of a template."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """Compile `source`; raise FormatError with the line if it is not a valid template."""
        from jinja2 import TemplateError, TemplateSyntaxError

        from ikcli.chat.sandbox import environment

        self.source = source
        if len(source) > MAX_SOURCE:
            raise FormatError(f"the chat template has {len(source)} characters; {MAX_SOURCE} are allowed")
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as e:
            raise FormatError(f"the chat template is broken at line {e.lineno}: {e.message}") from None
        except (TemplateError, RecursionError, ValueError, SyntaxError, MemoryError, IkError) as e:
            raise FormatError(f"the chat template is broken: {e or 'it is nested too deeply'}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        **variables: Any,
    ) -> str:
        """Render the prompt for `messages` (`role`, `content`, ...); other `variables` go to the template.

        As in transformers' `apply_chat_template`, `tools` and `documents` are always defined, as none if absent.
        Raise IkError if the template fails, calls `raise_exception`, or exceeds a limit.
        """
        from ikcli.chat.sandbox import Range, RenderBudget

        values = {
            **variables,
            "messages": deepcopy(list(messages)),
            "tools": deepcopy(list(tools)) if tools is not None else None,
            "documents": deepcopy(documents),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "range": Range(),
        }
        if "functools[" in self.source:  # FireFunction takes them as text under another name
            values.setdefault("functions", json.dumps(list(tools or ()), ensure_ascii=False, indent=4))
        try:
            with RenderBudget(sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))):
                return _limited(self._template.generate(values))
        except IkError:
            raise
        except RecursionError:
            raise IkError("the chat template fails: it calls itself without end") from None
        except Exception as e:  # an untrusted template can raise anything
            raise IkError(f"the chat template fails: {e or type(e).__name__}") from None


def _limited(parts: Iterable[str]) -> str:
    from ikcli.chat.sandbox import MAX_OUTPUT

    out, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_OUTPUT:
            raise IkError(f"the chat template writes more than {MAX_OUTPUT} characters")
        out.append(part)
    return "".join(out)
