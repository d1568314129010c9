"""Give tools to templates without them: the system prompt lists the tools, and the answer is one JSON object.

`{"response": ...}` answers, `{"tool_call": {...}}` or `{"tool_calls": [...]}` calls; a grammar enforces the format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ikcli.chat.content import json_value
from ikcli.chat.families.base import BLANK, SPACE, CallSink, Family, Node, Schema, TextSink, any_of, calls_of, seq
from ikcli.chat.families.json_calls import Keys, object_tree, read_list, read_object
from ikcli.chat.families.signatures import signature
from ikcli.chat.messages import Message, Tool
from ikcli.chat.reader import Malformed, Reader, Wait


class Generic(Family):
    """Calls and answers as one JSON object."""

    name = "Generic"
    own_message = True
    needs_tools = True
    openings = ("{",)

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of an object that calls."""
        call = any_of(object_tree(tool, Keys()) for tool in tools)
        if not parallel:
            return seq("{", SPACE, '"tool_call":', BLANK, call, SPACE, "}")
        calls = seq("[", SPACE, calls_of(call, True, seq(",", SPACE)), SPACE, "]")
        return seq("{", SPACE, '"tool_calls":', BLANK, calls, SPACE, "}")

    def answer_tree(self, answer: Schema | None) -> Node:
        """Return the tree of an object that answers, with text or with what the schema of the request accepts."""
        return seq("{", SPACE, '"response":', BLANK, answer or Schema({"type": "string"}), SPACE, "}")

    def message(self, out: TextSink, reader: Reader) -> Wait:
        """Read the object; anything else is content."""
        space = yield from reader.spaces()
        if (yield from reader.optional("{")):
            yield from out.section("{", space)
        else:
            out.content(space)
        yield from reader.until((), out.content)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read what follows the opening brace."""
        key = yield from reader.key()
        if key == "response":
            out.mark()
            if (yield from reader.peek()) == '"':
                yield from reader.json_string(out.content)
            else:
                yield from reader.json_value(out.content)
        elif key in ("tool_call", "tool_calls"):
            if (yield from reader.peek()) == "[":
                yield from read_list(out, reader)
            else:
                yield from read_object(out, reader)
        else:
            raise Malformed("key")
        out.mark()
        yield from reader.spaces()
        yield from reader.literal("}")
        out.mark()
        yield from reader.spaces()


def explain_tools(
    messages: Sequence[Message], tools: Sequence[Tool], *, must_call: bool, parallel: bool
) -> list[Message]:
    """Put the tools and the answer format into the system prompt, and write calls and results out as text."""
    call = '{"name": "function", "arguments": {"parameter": "value"}}'
    form = f'{{"tool_calls": [{call}]}}' if parallel else f'{{"tool_call": {call}}}'
    text = f"Reply with JSON only. To call: {form}"
    if not must_call:
        text += '\nTo answer: {"response": "text"}'
    return list_tools([written_out(message) for message in messages], tools, text)


def written_out(message: Message) -> Message:
    """Return `message` without the roles and fields that only templates with tools know."""
    if message.role == "tool":
        result = {"tool": message.name, "result": message.content} if message.name else {"result": message.content}
        text = json.dumps({"tool_response": result}, ensure_ascii=False)
        return Message("user", text)
    if not message.tool_calls:
        return message
    calls = [{"name": c.name, "arguments": json_value(c.arguments)} for c in message.tool_calls]
    key, value = ("tool_call", calls[0]) if len(calls) == 1 else ("tool_calls", calls)
    text = json.dumps({key: value}, ensure_ascii=False)
    return replace(message, content=f"{message.content}\n{text}".lstrip("\n"), parts=None, tool_calls=())


def list_tools(messages: Sequence[Message], tools: Sequence[Tool], how: str = "") -> list[Message]:
    """Put the tools into the system prompt, for templates that write calls but not the list of tools."""
    listing = "\n".join(signature(tool) for tool in tools)
    text = f"You can call these functions:\n{listing}"
    text += f"\n\n{how}" if how else ""
    out = list(messages)
    if out and out[0].role in ("system", "developer"):
        joined = f"{out[0].content}\n\n{text}" if out[0].content else text
        return [replace(out[0], content=joined, parts=None), *out[1:]]
    return [Message("system", text), *out]
