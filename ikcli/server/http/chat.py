"""Conversations to prompts and generated text to messages: the server's use of ikcli.chat (provisional)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ikcli.chat.messages import parse_messages
from ikcli.chat.template import ChatTemplate
from ikcli.config import RunConfig
from ikcli.errors import IkError
from ikcli.grammar.spec import GrammarSpec
from ikcli.server.http import fields as f
from ikcli.server.http.constraints import ConstraintMaker, spec_of
from ikcli.server.http.errors import bad_request
from ikcli.server.http.params import Options
from ikcli.server.http.shapes.message import MessageDelta, MessageParser
from ikcli.server.http.state import ServerState
from ikcli.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation ready for the engine."""

    text: str
    tokens: tuple[int, ...]
    spec: GrammarSpec | None
    stops: tuple[str, ...]
    keep_special: bool
    make_parser: Callable[[], MessageParser]

    def limited(self, state: ServerState, constraint: ConstraintMaker | None) -> ConstraintMaker | None:
        """The constraint with the budget for reasoning."""
        return constraint


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> Sequence[MessageDelta]:
        return [MessageDelta(content=text)] if text else []

    def finish(self) -> Sequence[MessageDelta]:
        return []


class ChatService:
    """The chat template of a server."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
        self.source = str(metadata.get("tokenizer.chat_template", ""))
        self._tokenizer = tokenizer

    def describe(self) -> dict[str, Any]:
        return {"chat_template": self.source, "chat_template_caps": {}}

    def log_fields(self) -> dict[str, Any]:
        return {"chat_example": "", "built_in": True}

    def render(self, body: Mapping[str, Any]) -> str:
        messages = parse_messages(body.get("messages"))
        return ChatTemplate(self.source).render([{"role": m.role, "content": m.content} for m in messages])


async def prepare(state: ServerState, body: Mapping[str, Any], options: Options) -> Prepared:
    """The prompt, constraint and parser of a conversation; ApiError 400 naming what is wrong."""
    try:
        text = await asyncio.to_thread(state.chat.render, body)
    except IkError as e:
        raise bad_request(str(e)) from None
    tokens = tuple(state.engine.tokenizer.encode(text))
    return Prepared(text, tokens, spec_of(options), (), False, PlainParser)


def response_schema(body: Mapping[str, Any]) -> Any:
    """The JSON schema that `response_format` asks for; None if any text is right."""
    value = body.get("response_format")
    if value is None:
        return None
    form = f.table(value, "response_format")
    kind = form.get("type")
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        schema, name = form.get("schema"), "response_format.schema"
        if schema is None:
            return {"type": "object"}
    elif kind == "json_schema":
        wrapper = form.get("json_schema")
        inner = form if wrapper is None else f.table(wrapper, "response_format.json_schema")
        name = "response_format.schema" if wrapper is None else "response_format.json_schema.schema"
        schema = inner.get("schema")
        if schema is None:
            raise bad_request("response_format.json_schema.schema is required")
    else:
        raise bad_request(f"response_format.type must be text, json_object or json_schema, not {f.shown(kind)}")
    if not isinstance(schema, dict | bool):
        raise bad_request(f"{name} must be an object, not {f.shown(schema)}")
    return schema
