"""Turn a chat request into a prompt, a constraint on the answer, and settings to parse the answer with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ikcli.chat.families.base import SPACE, Choice, Family, Marker, Node, Reasoning, Repeat, Schema, Until, seq
from ikcli.chat.families.generic import Generic
from ikcli.chat.families.harmony import Harmony
from ikcli.chat.parser import ChatParser, ParserSettings
from ikcli.chat.request import ChatRequest
from ikcli.grammar.spec import GrammarKind, GrammarSpec


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered request.

    `stops` end the answer beside the request's own; `preserved_tokens` are control tokens whose text the parser has to
    see.
    """

    prompt: str
    format: str
    settings: ParserSettings
    grammar: GrammarSpec | None = None
    stops: tuple[str, ...] = ()
    preserved_tokens: tuple[str, ...] = ()

    @property
    def thinking_forced_open(self) -> bool:
        """True if the prompt ends within the model's thinking."""
        return self.settings.thinking_forced_open

    def parser(self, new_id: Callable[[], str] | None = None) -> ChatParser:
        """Return a parser for one answer."""
        return ChatParser(self.settings, new_id)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the answer may begin: within thinking (`open`), with or without it (`possible`), or without."""

    tags: Reasoning | None
    open: bool
    possible: bool


def answer_grammar(request: ChatRequest, family: Family | None, thinking: Thinking) -> GrammarSpec | None:
    """Return the constraint on the answer, or None without one."""
    after = thinking.tags.close if thinking.open and thinking.tags else ""
    if request.grammar:
        return GrammarSpec(GrammarKind.GBNF, source=request.grammar, after=after)
    answer = None if request.json_schema is None else Schema(request.json_schema)
    if not request.calls_tools or family is None:
        if answer is None:
            return None
        return _answer(answer, family, thinking, after)
    tree = family.tree(request.callable_tools, request.parallel_tool_calls)
    must = request.tool_choice == "required"
    if isinstance(family, Generic):
        whole: Node = tree if must else Choice((tree, family.answer_tree(answer)))
    elif isinstance(family, Harmony) and (must or answer):
        call = family.required_tree(request.callable_tools, request.parallel_tool_calls)
        whole = call if must or not answer else Choice((call, family.answer_tree(answer)))
        return GrammarSpec(GrammarKind.TREE, tree=whole)
    elif must:
        whole = tree
    elif answer is not None:
        whole = Choice((tree, _wrapped(answer, family)))
    else:
        tools = request.callable_tools
        return GrammarSpec(
            GrammarKind.TREE,
            tree=tree,
            lazy=True,
            triggers=family.triggers(tools),
            at_start=family.start_triggers(tools),
            after=after,
            reasoning=(thinking.tags.open, thinking.tags.close) if thinking.tags else None,
        )
    return GrammarSpec(GrammarKind.TREE, tree=_thinking_first(whole, thinking), after=after)


def _answer(answer: Schema, family: Family | None, thinking: Thinking, after: str) -> GrammarSpec:
    if isinstance(family, Harmony):
        return GrammarSpec(GrammarKind.TREE, tree=family.answer_tree(answer))
    wrapped = family is not None and bool(family.dropped)
    if not (thinking.open or thinking.possible or wrapped):
        return GrammarSpec(GrammarKind.JSON_SCHEMA, schema=answer.schema)
    return GrammarSpec(GrammarKind.TREE, tree=_thinking_first(_wrapped(answer, family), thinking), after=after)


def _wrapped(answer: Schema, family: Family | None) -> Node:
    if family is None or not family.dropped:
        return answer
    opening, closing = family.dropped[:2]
    return seq(Repeat(Marker(opening), 0, 1), answer, Repeat(Marker(closing), 0, 1))


def _thinking_first(tree: Node, thinking: Thinking) -> Node:
    if thinking.open:
        return seq(SPACE, tree)
    if thinking.possible and thinking.tags:
        return seq(Repeat(seq(Marker(thinking.tags.open), Until(thinking.tags.close), SPACE), 0, 1), tree)
    return tree


def parser_settings(request: ChatRequest, family: Family | None, thinking: Thinking, *, live: bool) -> ParserSettings:
    """Return the settings to parse the answer to `request` with."""
    tools = {tool.name: tool.parameters for tool in request.callable_tools} if request.calls_tools else None
    settings = ParserSettings(
        family=family,
        reasoning=thinking.tags,
        reasoning_format=request.reasoning_format,
        thinking_forced_open=thinking.open,
        tools=tools,
        live=live,
    )
    if family is not None and family.name == "Mistral Nemo":  # its template takes identifiers of nine characters only
        settings = replace(settings, id_length=9)
    return settings
