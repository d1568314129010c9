"""Define the chat format of a model: its template, what it can do, and how it writes reasoning and tool calls.

Templates that do not know tools get them in the system prompt and answer in JSON (`families.generic`); templates
without a system role get the system prompt in front of the first message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ikcli.chat import builtin
from ikcli.chat.capabilities import Capabilities, call_shape, effort_variables, preserve_variables, probe
from ikcli.chat.content import RequestError, json_value
from ikcli.chat.families.base import Family
from ikcli.chat.families.detect import family_by_shape, family_of, reasoning_of
from ikcli.chat.families.generic import Generic, explain_tools, list_tools, written_out
from ikcli.chat.families.harmony import Harmony
from ikcli.chat.images import is_marker
from ikcli.chat.messages import Message
from ikcli.chat.prompt import ChatPrompt, Thinking, answer_grammar, parser_settings
from ikcli.chat.request import ChatRequest
from ikcli.chat.template import ChatTemplate
from ikcli.errors import FormatError, IkError, UnsupportedError

_EXAMPLE = (
    Message("system", "You are a helpful assistant"),
    Message("user", "Hello"),
    Message("assistant", "Hi there"),
    Message("user", "How are you?"),
)


class ChatFormat:
    """Renders requests for one model."""

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        add_bos: bool = False,
        add_eos: bool = False,
        tokens: Mapping[str, str] | None = None,
        tool_source: str = "",
        jinja: bool = True,
        notice: str = "",
    ) -> None:
        """Compile and probe `source` (`tool_source`: the one for requests with tools). `add_bos`: the tokenizer writes
        BOS itself, so the prompt must not. `tokens`: further variables with the text of a token, such as `pad_token`.
        FormatError with the line if a template is broken.
        """
        self.source = source
        self.notice = notice
        self.jinja = jinja
        self._bos, self._eos, self._add_bos, self._add_eos = bos, eos, add_bos, add_eos
        self._tokens = {**(tokens or {}), "bos_token": bos, "eos_token": eos}
        self._template = ChatTemplate(source)
        self._tool_template = ChatTemplate(tool_source) if tool_source else self._template
        self.capabilities = self._probe(self._template)
        same = self._tool_template is self._template
        self._tool_capabilities = self.capabilities if same else self._probe(self._tool_template)
        self._family = self._find_family(self._tool_template, self._tool_capabilities)
        self.reasoning, self.supports_thinking = reasoning_of(source)
        if isinstance(self._family, Harmony):
            self.reasoning, self.supports_thinking = Harmony.reasoning, True

    @classmethod
    def for_model(
        cls,
        template_source: str | None,
        *,
        bos: str = "",
        eos: str = "",
        add_bos: bool = False,
        add_eos: bool = False,
        tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        jinja: bool = True,
    ) -> ChatFormat:
        """Return the format of a template or of a built-in one by name; None: ChatML, with a `notice`.

        Without `jinja` a template stands for the built-in one of its format; UnsupportedError if there is none.
        """
        notice = ""
        named = builtin.by_name(template_source.strip()) if template_source else builtin.TEMPLATES["chatml"]
        if not template_source:
            notice = "the model has no chat template: using chatml (choose one with --chat-template)"
        elif named is None and not jinja:
            name = builtin.recognise(template_source)
            if name is None:
                raise UnsupportedError("the chat template matches no built-in format: leave out --no-jinja to use it")
            named = builtin.TEMPLATES[name]
        elif named is None and re.fullmatch(r"[\w.-]{1,40}", template_source.strip()):
            known = ", ".join(sorted(builtin.TEMPLATES))
            raise FormatError(f'unknown chat template "{template_source.strip()}"; built-in ones: {known}')
        source = named if named is not None else template_source or ""
        options: dict[str, Any] = {"bos": bos, "eos": eos, "add_bos": add_bos, "add_eos": add_eos, "tokens": tokens}
        options["jinja"] = jinja
        return cls(source, **options, tool_source="" if named else tool_source or "", notice=notice)

    @property
    def family(self) -> Family:
        """The family of tool call formats that this model's answers use."""
        return self._family

    def format_example(self, template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Render a short conversation as the model sees it, for the log."""
        request = ChatRequest(_EXAMPLE, template_kwargs=template_kwargs or {})
        return self.render(request).prompt

    def check(self) -> None:
        """Render a message; raise IkError if the template cannot."""
        self.render(ChatRequest((Message("user", "test"),)))

    def render(self, request: ChatRequest) -> ChatPrompt:
        """Render the prompt for `request`, with the constraint on the answer and how to parse it.

        RequestError if the template refuses the conversation or this format cannot do what is asked.
        """
        if not self.jinja and (request.tools or request.tool_choice != "auto"):
            raise RequestError("tools" if request.tools else "tool_choice", "needs templates: leave out --no-jinja")
        prefilled = request.messages[-1] if request.prefill else None
        if prefilled is not None:
            request = replace(request, messages=request.messages[:-1], add_generation_prompt=True)
        family = self._family if request.calls_tools or self._family.own_message else None
        if isinstance(family, Generic) and not request.calls_tools:
            family = None
        messages, tools = self._prepare(request, family)
        prompt = self._text_with_images(request, messages, tools)
        prompt, thinking = self._thinking(request, prompt)
        if prefilled is not None:
            prompt, thinking = self._continue(prompt, thinking, prefilled, family)
        grammar = answer_grammar(request, family, thinking)
        settings = parser_settings(request, family or self._wrappers(), thinking, live=grammar is not None)
        if request.skip_parsing:
            settings = replace(settings, family=None, tools=None, reasoning_format="none")
        preserved = (*(family.markers if family else ()), *self._thinking_tokens(thinking))
        return ChatPrompt(
            prompt=prompt,
            format=family.name if family and request.calls_tools else "Content-only",
            settings=settings,
            grammar=grammar,
            stops=family.stops if family and request.calls_tools else (),
            preserved_tokens=tuple(dict.fromkeys(preserved)),
        )

    # the template

    def _probe(self, template: ChatTemplate) -> Capabilities:
        return probe(template, self._bos, self._eos)

    def _find_family(self, template: ChatTemplate, can: Capabilities) -> Family:
        family = family_of(template.source)
        if family is None and can.tools and can.tool_calls:
            shape = call_shape(template, self._bos, self._eos, objects=can.object_arguments)
            family = family_by_shape(*shape) if shape else None
        if family is not None and (can.tools or can.tool_calls or family.own_message or can.tool_responses):
            return family
        return Generic()

    def _wrappers(self) -> Family | None:
        return self._family if self._family.dropped else None

    def _prepare(self, request: ChatRequest, family: Family | None) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """Convert messages and tools to what the template takes."""
        messages: list[Message] = list(request.messages)
        can = self._tool_capabilities if request.tools else self.capabilities
        tools = [tool.to_openai() for tool in request.callable_tools] if request.calls_tools else None
        if isinstance(family, Generic):
            must = request.tool_choice == "required"
            parallel = request.parallel_tool_calls
            messages = explain_tools(messages, request.callable_tools, must_call=must, parallel=parallel)
            tools = None
        elif tools and not can.tools:
            messages = list_tools(messages, request.callable_tools)
        if isinstance(self._family, Generic) or not can.tool_calls:
            native = can.tool_responses
            messages = [m if m.role == "tool" and native else written_out(m) for m in messages]
        if not isinstance(self._family, Harmony):
            messages = [replace(m, role="system") if m.role == "developer" else m for m in messages]
        if not can.system_role:
            messages = _without_system(messages)
        if request.template_kwargs.get("preserve_reasoning") is False:
            messages = _without_old_thoughts(messages)
        return [self._as_dict(m, can) for m in messages], tools

    def _as_dict(self, message: Message, can: Capabilities) -> dict[str, Any]:
        out: dict[str, Any] = {"role": message.role, "content": message.content}
        if can.typed_content and (message.parts is not None or not can.string_content):
            texts = message.parts if message.parts is not None else (message.content,)
            out["content"] = [{"type": "text", "text": text} for text in texts]
        if message.reasoning:
            out["reasoning_content"] = out["thinking"] = message.reasoning  # under both names, as transformers
            if isinstance(self._family, Harmony) and message.tool_calls:
                del out["content"]
        if message.name:
            out["name"] = message.name
        if message.tool_call_id:
            out["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            if can.null_content and not message.content:
                out["content"] = None
            out["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": c.name,
                        "arguments": _arguments(c.arguments, can),
                    },
                    **({"id": c.id} if c.id else {}),
                }
                for c in message.tool_calls
            ]
        return out

    def _text_with_images(self, request: ChatRequest, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Render a prompt in which markers stand for images, as the template places them.

        Where the template writes image parts, their tokens become the markers. Otherwise, and where texts of the
        conversation contain such tokens too, templates get the markers as texts.
        """
        tokens = (self._tool_capabilities if request.tools else self.capabilities).image
        typed, found = _with_image_parts(messages)
        if not tokens or not found:
            return self._text(request, messages, tools)
        try:
            texts = self._text(request, typed, tools).split(tokens)
        except RequestError:  # a template that takes images in some roles only
            texts = []
        if len(texts) != len(found) + 1:
            return self._text(request, messages, tools)
        return "".join(text + marker for text, marker in zip(texts, [*found, ""], strict=True))

    def _text(self, request: ChatRequest, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        template = self._tool_template if tools else self._template
        now = datetime.now()
        variables: dict[str, Any] = {
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            "add_generation_prompt": request.add_generation_prompt,
            "enable_thinking": request.thinking,
        }
        if request.enable_thinking is not None and "enable_thinking" not in self.source:
            variables["thinking"] = request.enable_thinking  # the name in some templates
        variables |= {k: v for k, v in request.template_kwargs.items() if k not in ("messages", "tools", "self")}
        variables = effort_variables(variables) | preserve_variables(variables) | variables
        try:
            text = template.render(messages, tools=tools, **(self._tokens | variables))
        except FormatError:
            raise
        except IkError as e:
            raise RequestError("messages", str(e)) from None
        if self._add_bos and self._bos and text.startswith(self._bos):
            text = text[len(self._bos) :]
        if self._add_eos and self._eos and text.endswith(self._eos):
            text = text[: -len(self._eos)]
        return text

    # thinking

    def _thinking(self, request: ChatRequest, prompt: str) -> tuple[str, Thinking]:
        """Return the prompt, with its reasoning closed if none is wanted, and how the answer may begin."""
        if isinstance(self._family, Harmony):
            return prompt, Thinking(Harmony.reasoning, False, request.thinking)
        tags = self.reasoning
        is_open = request.add_generation_prompt and prompt.rstrip().endswith(tags.open)
        if is_open and not request.thinking:
            return prompt + tags.close, Thinking(tags, False, False)
        closed = prompt.rstrip().endswith(tags.close)
        if tags.empty and not (request.thinking or closed or "enable_thinking" in self.source):
            return prompt + (tags.open + tags.close) * request.add_generation_prompt, Thinking(tags, False, False)
        possible = self.supports_thinking and request.thinking and not is_open and not closed
        return prompt, Thinking(tags, is_open, possible)

    def _thinking_tokens(self, thinking: Thinking) -> tuple[str, ...]:
        return (thinking.tags.open, thinking.tags.close) if thinking.tags else ()

    def _continue(self, prompt: str, thinking: Thinking, last: Message, family: Family | None) -> tuple[str, Thinking]:
        """Append the beginning of the answer to the prompt."""
        text = "".join(last.parts) if last.parts is not None else last.content
        if isinstance(family, Harmony):
            return f"{prompt}<|channel|>final<|message|>{text}", Thinking(None, False, False)
        tags = self.reasoning
        if thinking.open and last.reasoning and not text:
            return prompt + last.reasoning, thinking
        if thinking.open:
            return f"{prompt}{last.reasoning}{tags.close}{text}", Thinking(None, False, False)
        return prompt + text, Thinking(None, False, False)


def _with_image_parts(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages with image parts in place of markers, and those markers in order."""
    out, found = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            found += [part["text"] for part in content if is_marker(part["text"])]
            parts = [{"type": "image"} if is_marker(part["text"]) else part for part in content]
            message = {**message, "content": parts}
        out.append(message)
    return out, found


def _arguments(text: str, can: Capabilities) -> Any:
    """Return the arguments of a call as the template takes them: an object, or JSON text.

    What the model wrote may be neither, cut off by a limit or with a list for arguments. The client replays it, so it
    stays as it is where the template takes text, too, and elsewhere is the only member of an object.
    """
    if not can.object_arguments:
        return text
    value = json_value(text)
    if isinstance(value, dict):
        return value
    return text if can.text_arguments else {"arguments": text}


def _without_old_thoughts(messages: list[Message]) -> list[Message]:
    """Drop the reasoning before the last user turn; what comes after belongs to the current turn."""
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    return [replace(message, reasoning="") if i < last else message for i, message in enumerate(messages)]


def _without_system(messages: list[Message]) -> list[Message]:
    """Put the leading system prompt in front of the next message; later ones become user messages."""
    if messages and messages[0].role == "system" and len(messages) > 1:
        first, second = messages[:2]
        joined = f"{first.content}\n{second.content}" if second.content else first.content
        messages = [replace(second, content=joined, parts=None), *messages[2:]]
    return [replace(m, role="user") if m.role == "system" else m for m in messages]
