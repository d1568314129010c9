"""Conversations to prompts and generated text to messages: how the server uses ikcli.chat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikcli.chat.families.base import Reasoning
from ikcli.chat.formats import ChatFormat
from ikcli.chat.images import Images
from ikcli.chat.prompt import ChatPrompt
from ikcli.chat.request import ChatRequest
from ikcli.errors import IkError
from ikcli.grammar.spec import GrammarSpec
from ikcli.server.http.bodies import ChatBody
from ikcli.server.http.budget import ReasoningBudget, ReasoningControl
from ikcli.server.http.constraints import ConstraintMaker
from ikcli.server.http.errors import bad_request
from ikcli.server.http.page_settings import page_settings
from ikcli.server.http.prompts import Prompt, encode
from ikcli.server.http.shapes.message import ParserMaker
from ikcli.server.http.state import ServerState
from ikcli.server.http.templates import chat_defaults, template_option
from ikcli.server.prefix.keys import common_prefix
from ikcli.server.slots.messages import Constraint
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer


def check_options(config: RunConfig) -> None:
    """Raise an error for invalid chat options on the command line, before a model is loaded."""
    chat_defaults(config)
    page_settings(config.server)
    source = template_option(config)
    if source:
        ChatFormat.for_model(source, jinja=config.server.jinja)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation ready for the engine.

    `budget` is the number of thinking tokens, -1 without limit; `control` can end thinking earlier. `turns` holds the
    numbers of tokens before the first and the last user turn, for models that need checkpoints there.
    """

    chat: ChatPrompt
    prompt: Prompt
    keep_special: bool
    budget: int
    budget_message: str
    turns: tuple[int, ...] = ()
    control: ReasoningControl | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the prompt."""
        return self.prompt.tokens

    @property
    def text(self) -> str:
        """The prompt text."""
        return self.prompt.text

    @property
    def spec(self) -> GrammarSpec | None:
        """The constraint on the answer."""
        return self.chat.grammar

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer in addition to those of the request."""
        return self.chat.stops

    @property
    def make_parser(self) -> ParserMaker:
        """The factory of parsers for the answers."""
        return self.chat.parser

    def limited(self, tokenizer: Tokenizer, inner: ConstraintMaker | None) -> ConstraintMaker | None:
        """Return the constraint combined with the reasoning budget."""
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


async def prepare(
    state: ServerState, body: Mapping[str, Any], fields: ChatBody, images: Images | None = None
) -> PreparedChat:
    """Return the prompt, constraint and parser of a conversation. Raise ApiError 400 naming the faulty field.

    `images`: those that another API's body contained.
    """
    images = state.images() if images is None else images
    try:
        request, chat = await asyncio.to_thread(state.chat.read, body, images)
    except IkError as e:
        raise bad_request(str(e)) from None
    tokenizer = state.engine.tokenizer
    prompt = await _encoded(state, chat.prompt, images)
    if not prompt.tokens:
        raise bad_request("messages: the chat template made an empty prompt of them")
    known = tokenizer.vocab.token_to_id
    keep = any(text in known and tokenizer.is_control(known[text]) for text in chat.preserved_tokens)
    server = state.config.server
    budget = server.reasoning_budget if fields.reasoning_budget_tokens is None else fields.reasoning_budget_tokens
    message = fields.reasoning_budget_message
    words = server.reasoning_budget_message if message is None else message
    turns = await _turns(state, request, prompt.tokens, images) if state.engine.model.needs_checkpoints else ()
    control = ReasoningControl() if fields.reasoning_control and chat.settings.reasoning is not None else None
    return PreparedChat(chat, prompt, keep, budget, words, turns, control)


async def _encoded(state: ServerState, text: str, images: Images) -> Prompt:
    """Return the prompt of a rendered conversation."""
    if images and state.pictures is not None:
        return await state.pictures.prompt(text, images)
    return Prompt(tuple(await encode(state.engine.tokenizer, text, add_special=True)), text)


async def _turns(state: ServerState, request: ChatRequest, tokens: Sequence[int], images: Images) -> tuple[int, ...]:
    """Return the positions where conversations that share only a beginning with this one diverge from its prompt."""
    found = set()
    for text in await asyncio.to_thread(state.chat.beginnings, request):
        other = await _encoded(state, text, images)
        found.add(common_prefix(np.array(other.tokens), np.array(tokens)))
    return tuple(sorted(found - {0}))
