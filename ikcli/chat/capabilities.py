"""Probe what a chat template can do: render small conversations and look for their texts in the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ikcli.chat.template import ChatTemplate
from ikcli.errors import IkError

_NAME, _KEY, _VALUE = "probe_function", "probe_key", "probe value"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe description",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}
_USER = {"role": "user", "content": "probe question"}
_KEEP = {"preserve_reasoning": True}
_TOKENS = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_EFFORTS = ({"reasoning_effort": "low"}, {"reasoning_effort": "medium"}, {"reasoning_effort": "high"})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a template; `typed_content`: lists of parts, `object_arguments`: arguments not written as text."""

    string_content: bool = True
    typed_content: bool = False
    system_role: bool = True
    tools: bool = False
    tool_calls: bool = False
    tool_responses: bool = False
    parallel_tool_calls: bool = False
    object_arguments: bool = False
    text_arguments: bool = False
    """True if the template takes arguments as JSON text, too."""
    null_content: bool = False
    """True if the template writes calls only where the content is null."""
    preserve_reasoning: bool = False
    """True if thoughts of earlier turns can be kept."""
    reasoning_effort: bool = False
    image: str = ""
    """The text that the template writes for an image part, such as <start_of_image>; "" if none."""

    def to_props(self) -> dict[str, bool]:
        """Return the capabilities under the names that `/props` uses."""
        names = (
            "string_content", "typed_content", "tools", "tool_calls", "parallel_tool_calls", "system_role",
            "preserve_reasoning", "reasoning_effort", "object_arguments",
        )  # fmt: skip
        return {f"supports_{name}": getattr(self, name) for name in names}


def probe(template: ChatTemplate, bos: str, eos: str) -> Capabilities:
    """Render the probes with `template`."""

    def text(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **more: Any
    ) -> str:
        try:
            return template.render(messages, tools=tools, bos_token=bos, eos_token=eos, enable_thinking=True, **more)
        except IkError:
            return ""

    system = {"role": "system", "content": "probe system"}
    typed = text([{"role": "user", "content": [{"type": "text", "text": "probe question"}]}])
    objects = _calls_appear(text(_with_call({_KEY: _VALUE}), [_TOOL]))
    strings = _calls_appear(text(_with_call(json.dumps({_KEY: _VALUE})), [_TOOL]))
    null_content = False
    if not objects and not strings:
        objects = _calls_appear(text(_with_call({_KEY: _VALUE}, content=None), [_TOOL]))
        strings = _calls_appear(text(_with_call(json.dumps({_KEY: _VALUE}), content=None), [_TOOL]))
        null_content = objects or strings
    arguments: Any = {_KEY: _VALUE} if objects else json.dumps({_KEY: _VALUE})
    both = text(_with_call(arguments, calls=2, content=None if null_content else ""), [_TOOL])
    responses = text(_with_call(arguments, response=True), [_TOOL])
    thought = {"role": "assistant", "content": "probe answer", "reasoning_content": "probe thought"}
    thought["thinking"] = thought["reasoning_content"]
    efforts = {text([_USER], None, **effort, **effort_variables(effort)) for effort in _EFFORTS}
    listed = text([_USER], [_TOOL]) or text([system, _USER], [_TOOL])
    return Capabilities(
        string_content="probe question" in text([_USER]) or "probe question" not in typed,
        typed_content="probe question" in typed and "'text'" not in typed and '"text"' not in typed,
        system_role="probe system" in text([system, _USER]),
        tools=_NAME in listed,
        tool_calls=objects or strings,
        tool_responses="probe response" in responses,
        parallel_tool_calls="second_function" in both and _NAME in both,
        object_arguments=objects,
        text_arguments=strings,
        null_content=null_content,
        preserve_reasoning="probe thought" in text([_USER, thought, _USER], None, **preserve_variables(_KEEP)),
        reasoning_effort=len(efforts) > 1,
        image=_image_text(text, typed),
    )


def _image_text(render: Callable[..., str], typed: str) -> str:
    """Return what a template adds to a prompt (`typed`) for an image part: its first to its last control token.

    Line ends and numbers around them stay where the template writes them.
    """
    if "probe question" not in typed:
        return ""
    part = {"type": "text", "text": "probe question"}
    found = render([{"role": "user", "content": [part, {"type": "image"}]}])
    size = len(found) - len(typed)
    last = _n_common(found, typed)
    first = len(typed) - _n_common(found[::-1], typed[::-1])
    if size <= 0 or first > last:
        return ""
    # Text around the addition may begin or end like it, so it can be cut out at several places.
    added = [found[at : at + size] for at in range(first, last + 1)]
    whole = [match.group() for text in added if (match := _TOKENS.fullmatch(text.strip()))]
    inner = [match.group() for text in added if (match := _TOKENS.search(text))]
    return (whole or inner or [""])[0]


def _n_common(a: str, b: str) -> int:
    """Return the number of characters that two texts begin with."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def effort_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reasoning effort under the other name that templates use."""
    effort = variables.get("reasoning_effort")
    return {} if effort is None else {"reasoning_strength": effort}


def preserve_variables(variables: Mapping[str, Any]) -> dict[str, bool]:
    """Return the template variables that keep or drop the reasoning of earlier turns, as `preserve_reasoning` asks."""
    keep = variables.get("preserve_reasoning")
    if not isinstance(keep, bool):
        return {}
    dropped = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
    return {"preserve_thinking": keep} | dict.fromkeys(dropped, not keep)


def _with_call(
    arguments: Any, *, calls: int = 1, response: bool = False, content: str | None = ""
) -> list[dict[str, Any]]:
    names = (_NAME, "second_function")[:calls]
    listed = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name in enumerate(names)
    ]
    out: list[dict[str, Any]] = [_USER, {"role": "assistant", "content": content, "tool_calls": listed}]
    for call, name in zip(listed, names, strict=True):
        out.append({"role": "tool", "name": name, "content": "probe response", "tool_call_id": call["id"]})
    return out if response or calls > 1 else [*out, {"role": "assistant", "content": "probe answer"}, _USER]


def _calls_appear(prompt: str) -> bool:
    """Return True if the prompt has the call and its argument as JSON, not as a Python repr and not quoted twice."""
    at = prompt.rfind(_VALUE)
    if at < 0 or (prompt.count(_NAME) < 2 and f"'{_KEY}'" in prompt):
        return False
    near = prompt[max(0, at - 40) : at + len(_VALUE) + 4]
    return f"'{_KEY}'" not in near and '\\"' not in near


def call_shape(template: ChatTemplate, bos: str, eos: str, *, objects: bool) -> tuple[str, str] | None:
    """Render a prompt without and with one tool call, which shows how an unknown template writes calls."""
    arguments: Any = {_KEY: _VALUE} if objects else json.dumps({_KEY: _VALUE})
    messages = _with_call(arguments)[:2]
    plain = [_USER, {"role": "assistant", "content": ""}]
    try:
        options: dict[str, Any] = {"tools": [_TOOL], "bos_token": bos, "eos_token": eos, "add_generation_prompt": False}
        return template.render(plain, **options), template.render(messages, **options)
    except IkError:
        return None
