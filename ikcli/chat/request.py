"""Parse the chat part of a request in OpenAI's form: messages, tools, the answer format, template variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ikcli.chat.content import RequestError, describe
from ikcli.chat.images import NO_IMAGES, Images
from ikcli.chat.messages import Message, Tool, parse_messages, parse_tools
from ikcli.chat.parser import REASONING_FORMATS, ReasoningFormat

ToolChoice = Literal["auto", "none", "required"]
EFFORT = re.compile(r"[A-Za-z0-9_.-]{1,32}")
"""A level of reasoning; only the template knows which exist."""
TEMPLATE_DEFAULT = "default"
"""The effort that leaves the level to the template."""


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """Defaults from the server's options for what a request leaves open."""

    reasoning_format: ReasoningFormat = "auto"
    enable_thinking: bool = True
    parallel_tool_calls: bool = False
    prefill_assistant: bool = True
    skip_parsing: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. `function`: the only function to call (`tool_choice` is then "required").

    `json_schema` constrains the answer (None: text), `grammar` does so as GBNF. `prefill`: the last message is the
    beginning of the answer. `enable_thinking` None: the request leaves it open. `skip_parsing`: the whole answer is
    content.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    function: str = ""
    parallel_tool_calls: bool = False
    json_schema: Mapping[str, Any] | bool | None = None
    grammar: str = ""
    add_generation_prompt: bool = True
    prefill: bool = False
    enable_thinking: bool | None = None
    thinking_default: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: ReasoningFormat = "auto"
    skip_parsing: bool = False

    @property
    def thinking(self) -> bool:
        """True if the model may think."""
        return self.thinking_default if self.enable_thinking is None else self.enable_thinking

    @property
    def calls_tools(self) -> bool:
        """True if the answer may call functions."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The functions that may be called."""
        return tuple(t for t in self.tools if not self.function or t.name == self.function)


def parse_request(
    body: Mapping[str, Any], defaults: ChatDefaults | None = None, images: Images = NO_IMAGES
) -> ChatRequest:
    """Parse the chat fields of `body`, ignoring others, and collect its images.

    Raise RequestError naming the first bad field.
    """
    defaults = defaults or ChatDefaults()
    if "messages" not in body:
        raise RequestError("messages", "is required")
    messages = parse_messages(body["messages"], images=images)
    tools = parse_tools(body.get("tools"))
    tools, choice, function = _tool_choice(body.get("tool_choice"), tools)
    schema, grammar = _answer_form(body)
    if grammar and tools and choice != "none":
        raise RequestError("grammar", "cannot be combined with tools: the tools' own grammar constrains the answer")
    kwargs, thinking = _template_kwargs(body, defaults)
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        function=function,
        parallel_tool_calls=_flag(body, "parallel_tool_calls", defaults.parallel_tool_calls),
        json_schema=schema,
        grammar=grammar,
        add_generation_prompt=_flag(body, "add_generation_prompt", True),
        prefill=_prefill(body, messages, defaults),
        enable_thinking=thinking,
        thinking_default=defaults.enable_thinking,
        template_kwargs=kwargs,
        reasoning_format=_reasoning_format(body, defaults),
        skip_parsing=defaults.skip_parsing,
    )


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(key, f"expected true or false, got {describe(value)}")
    return value


def _string(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(key, f"expected a string, got {describe(value)}")
    return value


def _tool_choice(value: Any, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice, str]:
    """Return the tools that may be called, whether one must be, and which."""
    if value is None or value == "auto":
        return tools, "auto", ""
    if value == "none":
        return tools, "none", ""
    if value in ("required", "any"):
        if not tools:
            raise RequestError("tool_choice", f'"{value}" needs tools')
        return tools, "required", ""
    if not isinstance(value, Mapping):
        raise RequestError("tool_choice", 'expected "auto", "none", "required" or a function')
    if value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), tools)
    name = _chosen_name(value)
    if value.get("type", "function") != "function" or name is None:
        raise RequestError("tool_choice", 'expected {"type": "function", "function": {"name": ...}}')
    if name not in {tool.name for tool in tools}:
        raise RequestError("tool_choice.function.name", f'tools has no function "{name[:64]}"')
    return tools, "required", name


def _chosen_name(value: Any) -> str | None:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else value.get("name")
    return name if isinstance(name, str) else None


def _allowed(value: Any, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice, str]:
    """Return the allowed tools; the model is not shown the others."""
    path = "tool_choice.allowed_tools"
    if not isinstance(value, Mapping):
        raise RequestError(path, f"expected an object, got {describe(value)}")
    mode, entries = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{path}.mode", 'expected "auto" or "required"')
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise RequestError(f"{path}.tools", "expected a list of functions")
    names = {_chosen_name(entry) for entry in entries}
    left = tuple(tool for tool in tools if tool.name in names)
    if mode == "required" and not left:
        raise RequestError(f"{path}.tools", "none of them is in tools")
    return left, "required" if mode == "required" else "auto", ""


def _answer_form(body: Mapping[str, Any]) -> tuple[Mapping[str, Any] | bool | None, str]:
    """Return the JSON schema and the grammar of the answer; at most one of them is set."""
    schema = _schema(body.get("json_schema"), "json_schema")
    grammar = _string(body, "grammar")
    if schema is not None and grammar:
        raise RequestError("grammar", "cannot be combined with json_schema")
    form = body.get("response_format")
    if form is None:
        return schema, grammar
    if not isinstance(form, Mapping):
        raise RequestError("response_format", f"expected an object, got {describe(form)}")
    kind = form.get("type")
    if kind is None or kind == "text":
        return schema, grammar
    if kind == "json_object":
        found = _schema(form.get("schema"), "response_format.schema")
    elif kind == "json_schema":
        wrapper = form.get("json_schema")
        if wrapper is None and "schema" in form:
            wrapper = form
        if not isinstance(wrapper, Mapping):
            raise RequestError("response_format.json_schema", "expected an object with a schema")
        found = _schema(wrapper.get("schema"), "response_format.json_schema.schema")
    else:
        shown = f'"{kind[:64]}"' if isinstance(kind, str) else describe(kind)
        raise RequestError(
            "response_format.type", f'must be one of "text", "json_object" and "json_schema", but got: {shown}'
        )
    if grammar:
        raise RequestError("grammar", "cannot be combined with response_format")
    return ({"type": "object"} if found is None or found == {} else found), ""


def _schema(value: Any, path: str) -> Mapping[str, Any] | bool | None:
    if value is None or isinstance(value, bool | Mapping):
        return value
    raise RequestError(path, f"expected a JSON schema, got {describe(value)}")


def _template_kwargs(body: Mapping[str, Any], defaults: ChatDefaults) -> tuple[dict[str, Any], bool | None]:
    """Return template variables, and whether to reason if the request says so."""
    own = body.get("chat_template_kwargs")
    if own is not None and not isinstance(own, Mapping):
        raise RequestError("chat_template_kwargs", f"expected an object, got {describe(own)}")
    own = dict(own or {})
    kwargs = {**defaults.template_kwargs, **own}
    thinking = kwargs.pop("enable_thinking", None)
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError("chat_template_kwargs.enable_thinking", f"expected true or false, got {describe(thinking)}")
    if "enable_thinking" in body:
        thinking = _flag(body, "enable_thinking", True)
    if not isinstance(kwargs.get("preserve_reasoning", True), bool):
        raise RequestError("chat_template_kwargs.preserve_reasoning", "expected true or false")
    effort = _string(body, "reasoning_effort")
    if effort and not EFFORT.fullmatch(effort):
        raise RequestError("reasoning_effort", "expected a level such as none, low, medium or high")
    if effort == "none":
        thinking = False
    elif effort and "reasoning_effort" not in own:
        kwargs["reasoning_effort"] = effort
    if kwargs.get("reasoning_effort") == TEMPLATE_DEFAULT:
        del kwargs["reasoning_effort"]
    for key in ("reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget"):
        if body.get(key) == 0 and not isinstance(body.get(key), bool):
            thinking = False
    return kwargs, thinking


def _prefill(body: Mapping[str, Any], messages: tuple[Message, ...], defaults: ChatDefaults) -> bool:
    go_on = _flag(body, "continue_final_message", defaults.prefill_assistant)
    last = messages[-1]
    if not go_on or last.role != "assistant" or last.tool_calls:
        return False
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise RequestError("messages", "Cannot have 2 or more assistant messages at the end of the list.")
    return True


def _reasoning_format(body: Mapping[str, Any], defaults: ChatDefaults) -> ReasoningFormat:
    value = _string(body, "reasoning_format")
    if not value:
        return defaults.reasoning_format
    for known in REASONING_FORMATS:
        if value == known:
            return known
    raise RequestError("reasoning_format", f"must be one of {', '.join(REASONING_FORMATS)}")
