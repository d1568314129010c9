"""Parse generated text to content, reasoning and tool calls while it arrives.

The pieces that a client gets add up to the final message, however the text was cut. Text that may start a marker is
held back; a tool call that breaks its format becomes content. With `live` (a grammar enforces the format) arguments are
streamed as they come; otherwise a call is passed on when it is complete.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ikcli.chat.families.base import Family, Reasoning
from ikcli.chat.messages import ToolCall
from ikcli.chat.reader import Malformed, Reader, Wait

ReasoningFormat = Literal["none", "deepseek", "deepseek-legacy", "auto"]
REASONING_FORMATS: tuple[ReasoningFormat, ...] = ("none", "deepseek", "deepseek-legacy", "auto")
_ID_CHARS = string.ascii_letters + string.digits


def new_call_id(length: int = 32) -> str:
    """Return a random identifier of letters and digits."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(length))


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A piece of a message: content, reasoning, or of the tool call `index` (its first piece has `id` and `name`)."""

    content: str = ""
    reasoning: str = ""
    index: int = -1
    id: str = ""
    name: str = ""
    arguments: str = ""

    def to_openai(self) -> dict[str, Any]:
        """Return the `delta` of a streamed chunk."""
        if self.index >= 0:
            function: dict[str, Any] = {"name": self.name} if self.name else {}
            function["arguments"] = self.arguments
            head: dict[str, Any] = {"index": self.index}
            if self.name:
                head |= {"id": self.id, "type": "function"}
            return {"tool_calls": [{**head, "function": function}]}
        return {"reasoning_content": self.reasoning} if self.reasoning else {"content": self.content}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A parsed message of the assistant."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_openai(self) -> dict[str, Any]:
        """Return the `message` of a choice; without text beside tool calls its content is null."""
        out: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            out["content"] = self.content or None
            out["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        return out


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """How to read one answer. `tools` (schemas by name) None: tool calls are left in the content."""

    family: Family | None = None
    reasoning: Reasoning | None = None
    reasoning_format: ReasoningFormat = "auto"
    thinking_forced_open: bool = False
    tools: Mapping[str, Mapping[str, Any]] | None = None
    live: bool = True
    id_length: int = 32


@dataclass
class _Call:
    name: str
    id: str
    arguments: list[str] = field(default_factory=list)
    complete: bool = False


class ChatParser:
    """Reads one answer. Feed it text, then `flush`; `message` is what the deltas so far add up to."""

    def __init__(self, settings: ParserSettings, new_id: Callable[[], str] | None = None) -> None:
        """Parse one answer; `new_id` makes ids for calls without one."""
        self.tools: Mapping[str, Mapping[str, Any]] = settings.tools or {}
        self.raw_reasoning = settings.reasoning_format == "none"
        self._settings = settings
        self._new_id = new_id or (lambda: new_call_id(settings.id_length))
        self._reader = Reader()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._deltas: list[ChatDelta] = []
        self._held: list[tuple[str, str, str]] | None = None
        """Events of a section that may still turn out not to be a call; None applies events at once."""
        self._open_section = False
        self._run: Wait | None = self._message()
        self._step()

    # called by the server

    def feed(self, text: str) -> list[ChatDelta]:
        """Take `text` and return the deltas that are now certain."""
        if not text:
            return []
        self._reader.feed(text)
        return self._step()

    def flush(self) -> list[ChatDelta]:
        """End the text and return the deltas that were held back."""
        self._reader.ended = True
        return self._step()

    def finish(self) -> ChatMessage:
        """Return the whole message; flushes first, dropping the last deltas if `flush` was not called."""
        self.flush()
        return self.message

    @property
    def message(self) -> ChatMessage:
        """The message so far."""
        calls = tuple(ToolCall(c.name, "".join(c.arguments), c.id, c.complete) for c in self._calls)
        return ChatMessage("".join(self._content), "".join(self._reasoning), calls)

    # called by families (TextSink)

    def content(self, text: str) -> None:
        """Append text to the answer."""
        self._commit()
        if text:
            self._content.append(text)
            self._deltas.append(ChatDelta(content=text))

    def thought(self, text: str) -> None:
        """Append text to the reasoning."""
        if self._settings.reasoning_format == "none":
            self.content(text)
            return
        self._commit()
        if text:
            self._reasoning.append(text)
            self._deltas.append(ChatDelta(reasoning=text))
            if self._settings.reasoning_format == "deepseek-legacy":
                self._content.append(text)
                self._deltas.append(ChatDelta(content=text))

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of `name`."""
        self._event("begin", name, id)

    def arguments(self, text: str) -> None:
        """Append JSON text to the arguments of the call."""
        self._event("arguments", text, "")
        if self._settings.live:
            self._commit()

    def end_call(self) -> None:
        """End the call."""
        self._event("end", "", "")
        self._commit()

    def mark(self) -> None:
        """Commit what was read: nothing that follows can revoke it."""
        if self._open_section:
            self._commit()
            self._held = []
            self._opening = ""
            self._reader.keep = self._reader.pos

    def section(self, opening: str, before: str = "") -> Wait:
        """Read tool calls after `opening`, or take them as content, after `before`, if they are malformed."""
        family = self._settings.family
        assert family is not None
        self._open_section, self._held, self._opening = True, [], before + opening
        self._reader.keep = self._reader.pos
        calls = len(self._calls)
        try:
            yield from family.calls(self, self._reader, opening)
            self._commit()
        except Malformed:
            if self._held is not None:
                self._held = None
                self._reader.pos = self._reader.keep
                self.content(self._opening)
        self._open_section, self._held, self._reader.keep = False, None, -1
        self._after_calls = len(self._calls) > calls

    # reading

    _opening = ""
    _after_calls = False

    def _event(self, kind: str, text: str, id: str) -> None:
        if self._held is not None:
            self._held.append((kind, text, id))
        else:
            self._apply(kind, text, id)

    def _commit(self) -> None:
        if self._held is None:
            return
        held, self._held, self._reader.keep = self._held, None, -1
        for event in held:
            self._apply(*event)

    def _apply(self, kind: str, text: str, id: str) -> None:
        index = len(self._calls) if kind == "begin" else len(self._calls) - 1
        if kind == "begin":
            call = _Call(text, id or self._new_id())
            self._calls.append(call)
            self._deltas.append(ChatDelta(index=index, id=call.id, name=call.name))
        elif kind == "arguments":
            if text:
                self._calls[-1].arguments.append(text)
                self._deltas.append(ChatDelta(index=index, arguments=text))
        else:
            self._calls[-1].complete = True

    def _step(self) -> list[ChatDelta]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        elif self._reader.pos < len(self._reader.text):  # nothing should be left; never lose text
            self.content(self._reader.text[self._reader.pos :])
            self._reader.pos = len(self._reader.text)
        out, self._deltas = _merged(self._deltas), []
        return out

    def _message(self) -> Wait:
        settings, family = self._settings, self._settings.family
        own = family is not None and family.own_message and (settings.tools is not None or not family.needs_tools)
        if settings.reasoning is not None and not (own and family is not None and not family.needs_tools):
            yield from self._thinking(settings.reasoning)
        if own and family is not None:
            yield from family.message(self, self._reader)
        else:
            yield from self._answer(family if settings.tools is not None else None)

    def _thinking(self, tags: Reasoning) -> Wait:
        reader, settings = self._reader, self._settings
        raw = settings.reasoning_format == "none"
        before = yield from reader.spaces()
        opened = yield from reader.optional(tags.open)
        if not opened and not settings.thinking_forced_open:
            self.content(before)
            return
        if raw or settings.reasoning_format == "deepseek-legacy":
            self.content((before if raw else "") + (tags.open if opened or not raw else ""))
        space = yield from reader.spaces()
        if raw:
            self.content(space)
        closed = yield from reader.until((tags.close,), self.thought, strip=not raw)
        if closed and settings.reasoning_format in ("none", "deepseek-legacy"):
            self.content(tags.close)
        if not raw:
            yield from reader.spaces()

    def _answer(self, family: Family | None) -> Wait:
        reader = self._reader
        dropped = self._settings.family.dropped if self._settings.family else ()
        if family is None:
            while (yield from reader.until(dropped, self.content)) is not None:
                pass
            return
        if family.start_openings:
            space = yield from reader.spaces()
            opening = yield from reader.one_of(family.start_openings)
            if opening:
                yield from self.section(opening, space)
            else:
                self.content(space)
        while True:
            if self._after_calls:  # line breaks between calls are not content
                yield from reader.spaces()
            found = yield from reader.until((*family.openings, *dropped), self.content, strip=True)
            if found is None:
                return
            if found not in dropped:
                yield from self.section(found, reader.stripped)


def _merged(deltas: list[ChatDelta]) -> list[ChatDelta]:
    """Merge neighbouring deltas of the same kind."""
    out: list[ChatDelta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last is None or last.index != delta.index or delta.name or bool(last.reasoning) != bool(delta.reasoning):
            out.append(delta)
        else:
            out[-1] = replace(
                last,
                content=last.content + delta.content,
                reasoning=last.reasoning + delta.reasoning,
                arguments=last.arguments + delta.arguments,
            )
    return out


__all__ = ["REASONING_FORMATS", "ChatDelta", "ChatMessage", "ChatParser", "ParserSettings", "ReasoningFormat"]
