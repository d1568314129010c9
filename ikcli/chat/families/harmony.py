"""The Harmony format of gpt-oss: messages of the assistant on channels analysis, commentary and final.

`<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..`; a call names its recipient in
the header: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ikcli.chat.families.base import (
    CallSink,
    Family,
    Marker,
    Node,
    Reasoning,
    Repeat,
    Schema,
    TextSink,
    Until,
    any_of,
    arguments_schema,
    seq,
    whole,
)
from ikcli.chat.families.json_calls import read_arguments
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Reader, Wait
from ikcli.chat.unescaped import text_until
from ikcli.grammar.spec import Gap

CHANNEL, MESSAGE, START = Marker("<|channel|>"), Marker("<|message|>"), Marker("<|start|>")
_NEXT = ((Gap.SPACES, "<|start|>"), (Gap.SPACES, "<|channel|>"), (Gap.SPACES, Gap.END))
_ENDS = (
    *(Until(end, _NEXT) for end in ("<|end|>", "<|return|>", "<|call|>")),
    Until("<|start|>", (("assistant",), (Gap.END,))),
)
"""Markers that end a message; elsewhere these texts are part of it."""
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_THINKING = seq(CHANNEL, "analysis", MESSAGE, Until("<|end|>", _NEXT), whole(START, "assistant"))
_CONSTRAINT = Repeat(any_of((seq(" json"), seq(" ", Marker("<|constrain|>"), "json"))), 0, 1)


class Harmony(Family):
    """gpt-oss."""

    name = "GPT-OSS"
    openings = (" to=functions.",)
    markers = ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>")
    own_message = True
    reasoning = Reasoning("<|channel|>analysis<|message|>", "<|end|>")

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of one call from its recipient on, which stands in the role or in the channel."""
        options = (seq(t.name, self._header(), MESSAGE, arguments_schema(t)) for t in tools)
        return seq(" to=functions.", any_of(options))

    def _header(self) -> Node:
        return seq(Repeat(seq(CHANNEL, any_of((seq("commentary"), seq("analysis")))), 0, 1), _CONSTRAINT)

    def required_tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of a message that calls a function, with optional reasoning first."""
        options = (seq(t.name, _CONSTRAINT, MESSAGE, arguments_schema(t)) for t in tools)
        call = seq(CHANNEL, "commentary to=functions.", any_of(options))
        return seq(Repeat(_THINKING, 0, 1), call)

    def answer_tree(self, answer: Schema) -> Node:
        """Return the tree of a final message that the schema accepts, with optional reasoning first."""
        return seq(Repeat(_THINKING, 0, 1), CHANNEL, "final", _CONSTRAINT, MESSAGE, answer)

    def message(self, out: TextSink, reader: Reader) -> Wait:
        """Read messages by channel; text without a header is content."""
        begin = yield from reader.one_of(("<|channel|>", " to=", "<|message|>", "<|start|>"))
        if begin is None:
            yield from reader.until((), out.content)
            return
        while True:
            parts = [begin]
            if begin != "<|message|>" and (yield from reader.until(("<|message|>",), parts.append)) is None:
                return
            begin = ""
            head = "".join(parts)
            recipient = _RECIPIENT.search(head)
            if recipient and recipient[1] in out.tools:
                yield from out.section(head)
                more = yield from text_until(reader, _ENDS, out.content, strip=True)
            elif "analysis" in head and not recipient:
                out.thought(head if out.raw_reasoning else "")
                more = yield from text_until(reader, _ENDS, out.thought)
                out.thought(more if out.raw_reasoning else "")
            else:
                more = yield from text_until(reader, _ENDS, out.content)
            if not more:
                return

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read the arguments; `opening` is the message's header."""
        recipient = _RECIPIENT.search(opening)
        assert recipient is not None
        out.begin_call(recipient[1])
        yield from reader.spaces()
        yield from read_arguments(out.arguments, reader)
        out.end_call()
        out.mark()
        yield from reader.spaces()
