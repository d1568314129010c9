"""A server's chat template, and the chat options of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from ikcli.chat.formats import ChatFormat
from ikcli.chat.images import NO_IMAGES, Images
from ikcli.chat.messages import Message
from ikcli.chat.parser import ReasoningFormat
from ikcli.chat.prompt import ChatPrompt
from ikcli.chat.request import EFFORT, TEMPLATE_DEFAULT, ChatDefaults, ChatRequest, parse_request
from ikcli.errors import IkError, UsageError
from ikcli.server.http.params import option_text
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer

_TEMPLATE = "tokenizer.chat_template"
_OTHER = "\N{SECTION SIGN}"  # an unlikely beginning of a turn


class ChatService:
    """Chat template of a server and its defaults."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
        """Load the template.

        Raise IkError if a template of the command line is broken; one of the model's file only fails when it is used.
        """
        given = template_option(config)
        own = metadata.get(_TEMPLATE)
        tool_source = metadata.get(f"{_TEMPLATE}.tool_use") if not given else None
        self.built_in = not given
        self.tool_source = tool_source if isinstance(tool_source, str) else ""
        self.source = given or (own if isinstance(own, str) else "")
        self.defaults = chat_defaults(config)
        self._format: ChatFormat | IkError
        try:
            self._format = ChatFormat.for_model(
                self.source or None,
                bos=_text(tokenizer, tokenizer.bos_id),
                eos=_text(tokenizer, tokenizer.eos_id),
                add_bos=tokenizer.add_bos,
                add_eos=tokenizer.add_eos,
                tokens=_token_texts(tokenizer),
                tool_source=self.tool_source or None,
                jinja=config.server.jinja,
            )
        except IkError as e:
            if given:
                raise
            self._format = e

    @property
    def format(self) -> ChatFormat:
        """Format of the template. Raise IkError if the model's template is broken."""
        if isinstance(self._format, IkError):
            raise IkError(f"{self._format}; choose another template with --chat-template")
        return self._format

    @property
    def thinks(self) -> bool:
        """Whether the template supports thinking."""
        return not isinstance(self._format, IkError) and self._format.supports_thinking

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools."""
        return not isinstance(self._format, IkError) and self._format.capabilities.tools

    def describe(self) -> dict[str, Any]:
        """Return the template's entries in `/props`."""
        broken = isinstance(self._format, IkError)
        out = {
            "chat_template": self.source if broken else self.format.source,
            "chat_template_caps": {} if broken else self.format.capabilities.to_props(),
        }
        return out | ({"chat_template_tool_use": self.tool_source} if self.tool_source else {})

    def log_fields(self) -> dict[str, Any]:
        """Return a short conversation as the model sees it."""
        try:
            example = self.format.format_example(self.defaults.template_kwargs)
        except IkError as e:
            return {"error": str(e), "built_in": self.built_in}
        return {"chat_example": example, "built_in": self.built_in}

    def read(self, body: Mapping[str, Any], images: Images = NO_IMAGES) -> tuple[ChatRequest, ChatPrompt]:
        """Return a request and its prompt, with its images in `images`. Raise IkError naming the faulty field."""
        request = parse_request(body, self.defaults, images)
        return request, self.format.render(request)

    def beginnings(self, request: ChatRequest) -> list[str]:
        """Return prompts of conversations that share a beginning and then differ in the first or the last user turn."""
        users = [i for i, message in enumerate(request.messages) if message.role == "user"]
        prompts = []
        for i in {users[0], users[-1]} if users else ():
            messages = (*request.messages[:i], Message("user", _OTHER))
            with suppress(IkError):  # a template that demands more of a conversation
                prompts.append(self.format.render(replace(request, messages=messages, prefill=False)).prompt)
        return prompts


def template_option(config: RunConfig) -> str:
    """Return the template that the command line names or contains."""
    return option_text(config.server.chat_template, config.server.chat_template_file, "chat template")


def chat_defaults(config: RunConfig) -> ChatDefaults:
    """Return the chat defaults of the command line."""
    server = config.server
    kwargs: Any = {}
    if server.chat_template_kwargs:
        try:
            kwargs = json.loads(server.chat_template_kwargs)
        except ValueError as e:
            raise UsageError(f"--chat-template-kwargs is not JSON: {e}") from None
        if not isinstance(kwargs, dict):
            raise UsageError("--chat-template-kwargs must be a JSON object")
    effort = server.reasoning_effort
    if not EFFORT.fullmatch(effort):
        raise UsageError(f"--reasoning-effort {effort}: name a level such as none, low, medium or high, or default")
    if effort not in (TEMPLATE_DEFAULT, "none"):
        kwargs["reasoning_effort"] = effort
    if server.reasoning_preserve is not None:
        kwargs["preserve_reasoning"] = server.reasoning_preserve
    return ChatDefaults(
        reasoning_format=cast(ReasoningFormat, server.reasoning_format),
        enable_thinking=server.reasoning != "off" and server.reasoning_budget != 0 and effort != "none",
        prefill_assistant=server.prefill_assistant,
        skip_parsing=server.skip_chat_parsing,
        template_kwargs=kwargs,
    )


def _token_texts(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the template variables for the model's tokens besides `bos_token` and `eos_token`."""
    ids = tokenizer.special_ids
    found = {"unk_token": ids.unk, "sep_token": ids.sep, "pad_token": ids.pad, "cls_token": ids.cls,
             "mask_token": ids.mask}  # fmt: skip
    return {name: tokenizer.token_text(token) for name, token in found.items() if token is not None}


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)
