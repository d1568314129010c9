"""Conversations to prompts and generated text to messages: the server's use of ikcli.chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ikcli.chat.families.base import Reasoning
from ikcli.chat.formats import ChatFormat
from ikcli.chat.messages import Message
from ikcli.chat.parser import ReasoningFormat
from ikcli.chat.prompt import ChatPrompt
from ikcli.chat.request import EFFORT, TEMPLATE_DEFAULT, ChatDefaults, ChatRequest, parse_request
from ikcli.errors import IkError, UsageError
from ikcli.grammar.spec import GrammarSpec
from ikcli.server.http import fields as f
from ikcli.server.http.budget import ReasoningBudget, ReasoningControl
from ikcli.server.http.constraints import ConstraintMaker
from ikcli.server.http.errors import bad_request
from ikcli.server.http.page_settings import page_settings
from ikcli.server.http.params import option_text
from ikcli.server.http.prompts import encode
from ikcli.server.http.shapes.message import ParserMaker
from ikcli.server.http.state import ServerState
from ikcli.server.slots.messages import Constraint
from ikcli.server.slots.prompt_cache import common_prefix
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer

_TEMPLATE = "tokenizer.chat_template"
_OTHER = "\N{SECTION SIGN}"  # how hardly any turn begins
_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget")


class ChatService:
    """The chat template of a server and its defaults."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
        """IkError if a template of the command line is broken; one of the model's file only fails when it is used."""
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
        """The template's format; IkError if the model's template is broken."""
        if isinstance(self._format, IkError):
            raise IkError(f"{self._format}; choose another template with --chat-template")
        return self._format

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thinking."""
        return not isinstance(self._format, IkError) and self._format.supports_thinking

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools."""
        return not isinstance(self._format, IkError) and self._format.capabilities.tools

    def describe(self) -> dict[str, Any]:
        """What `/props` says about the template."""
        broken = isinstance(self._format, IkError)
        out = {
            "chat_template": self.source if broken else self.format.source,
            "chat_template_caps": {} if broken else self.format.capabilities.to_props(),
        }
        return out | ({"chat_template_tool_use": self.tool_source} if self.tool_source else {})

    def log_fields(self) -> dict[str, Any]:
        """A short conversation as the model sees it."""
        try:
            example = self.format.format_example(self.defaults.template_kwargs)
        except IkError as e:
            return {"error": str(e), "built_in": self.built_in}
        return {"chat_example": example, "built_in": self.built_in}

    def read(self, body: Mapping[str, Any]) -> tuple[ChatRequest, ChatPrompt]:
        """A request and its prompt; IkError naming what is wrong with it."""
        request = parse_request(body, self.defaults)
        return request, self.format.render(request)

    def beginnings(self, request: ChatRequest) -> list[str]:
        """Prompts of conversations that begin like this one and end with another first, or last, user turn."""
        users = [i for i, message in enumerate(request.messages) if message.role == "user"]
        prompts = []
        for i in {users[0], users[-1]} if users else ():
            messages = (*request.messages[:i], Message("user", _OTHER))
            with suppress(IkError):  # a template that wants more of a conversation
                prompts.append(self.format.render(replace(request, messages=messages, prefill=False)).prompt)
        return prompts


def check_options(config: RunConfig) -> None:
    """Raise what is wrong with the chat options of a command line, before a model is loaded."""
    chat_defaults(config)
    page_settings(config.server)
    source = template_option(config)
    if source:
        ChatFormat.for_model(source, jinja=config.server.jinja)


def template_option(config: RunConfig) -> str:
    """The template that the command line names or holds."""
    return option_text(config.server.chat_template, config.server.chat_template_file, "chat template")


def chat_defaults(config: RunConfig) -> ChatDefaults:
    """What the command line says about chats."""
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
    """The variables beside `bos_token` and `eos_token` that templates have for tokens of the model."""
    ids = tokenizer.special_ids
    found = {"unk_token": ids.unk, "sep_token": ids.sep, "pad_token": ids.pad, "cls_token": ids.cls,
             "mask_token": ids.mask}  # fmt: skip
    return {name: tokenizer.token_text(token) for name, token in found.items() if token is not None}


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation ready for the engine. `budget` tokens of thinking, -1 without limit; `control` ends it earlier.

    `turns`: how many tokens come before the first and the last user turn, for models that need checkpoints there.
    """

    chat: ChatPrompt
    tokens: tuple[int, ...]
    keep_special: bool
    budget: int
    budget_message: str
    turns: tuple[int, ...] = ()
    control: ReasoningControl | None = None

    @property
    def text(self) -> str:
        """The prompt."""
        return self.chat.prompt

    @property
    def spec(self) -> GrammarSpec | None:
        """The constraint on the answer."""
        return self.chat.grammar

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer beside those of the request."""
        return self.chat.stops

    @property
    def make_parser(self) -> ParserMaker:
        """Makes the parser of an answer."""
        return self.chat.parser

    def limited(self, tokenizer: Tokenizer, inner: ConstraintMaker | None) -> ConstraintMaker | None:
        """The constraint together with the budget for thinking."""
        tags = self.chat.settings.reasoning
        if tags is None or not tags.close or (self.budget < 0 and self.control is None):
            return inner
        return lambda: self._budget(tokenizer, inner, tags)

    def _budget(self, tokenizer: Tokenizer, inner: ConstraintMaker | None, tags: Reasoning) -> Constraint:
        return ReasoningBudget(
            inner() if inner is not None else None,
            tokenizer,
            open=tags.open,
            close=tags.close,
            budget=self.budget,
            opened=self.chat.thinking_forced_open,
            message=self.budget_message,
            control=self.control,
        )


async def prepare(state: ServerState, body: Mapping[str, Any]) -> PreparedChat:
    """The prompt, constraint and parser of a conversation; ApiError 400 naming what is wrong."""
    budget = _budget(body, state.config.server.reasoning_budget)
    message = body.get("reasoning_budget_message")
    controlled = body.get("reasoning_control") is not None and f.boolean(body["reasoning_control"], "reasoning_control")
    try:
        request, chat = await asyncio.to_thread(state.chat.read, body)
    except IkError as e:
        raise bad_request(str(e)) from None
    tokenizer = state.engine.tokenizer
    tokens = tuple(await encode(tokenizer, chat.prompt, add_special=True))
    if not tokens:
        raise bad_request("messages: the chat template made an empty prompt of them")
    known = tokenizer.vocab.token_to_id
    keep = any(text in known and tokenizer.is_control(known[text]) for text in chat.preserved_tokens)
    words = state.config.server.reasoning_budget_message
    if message is not None:
        words = f.text(message, "reasoning_budget_message")
    turns = await _turns(state, request, tokens) if state.engine.model.needs_checkpoints else ()
    control = ReasoningControl() if controlled and chat.settings.reasoning is not None else None
    return PreparedChat(chat, tokens, keep, budget, words, turns, control)


async def _turns(state: ServerState, request: ChatRequest, tokens: Sequence[int]) -> tuple[int, ...]:
    """Where the prompt of a conversation differs from those of others that only begin alike."""
    found = set()
    for text in await asyncio.to_thread(state.chat.beginnings, request):
        other = await encode(state.engine.tokenizer, text, add_special=True)
        found.add(common_prefix(np.array(other), np.array(tokens)))
    return tuple(sorted(found - {0}))


def _budget(body: Mapping[str, Any], default: int) -> int:
    for name in _BUDGETS:
        if body.get(name) is not None:
            return int(f.checked(body[name], "int", name, -1, f.INT32))
    return default
