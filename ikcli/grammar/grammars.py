"""Compiling grammars and schemas for one vocabulary. Everything that may be wrong with them comes up here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from ikcli.grammar.constraint import GrammarConstraint, LazyConstraint, digits_of, first_line
from ikcli.grammar.gbnf import parse_gbnf
from ikcli.grammar.lark import HEADER, to_lark
from ikcli.grammar.nodes import GrammarError
from ikcli.grammar.schema import prepare_schema
from ikcli.grammar.spec import GrammarKind, GrammarSpec
from ikcli.grammar.tree import tree_rules
from ikcli.grammar.vocabulary import Vocabulary
from ikcli.tokenizer import Tokenizer

ConstraintMaker = Callable[[], GrammarConstraint | LazyConstraint]

_LARK_MARK = "%llguidance"
_MOST_KEPT = 32


class Grammars:
    """Grammars of one tokenizer; thread-safe. Compiled ones are kept, so that asking again costs nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> ConstraintMaker:
        """A maker of constraints for `spec`, each for one generation. GrammarError if the grammar is wrong.

        Takes milliseconds, up to a few seconds for a hostile grammar: not for the thread of the engine.
        """
        return self._maker(spec, "root")

    def gbnf(self, text: str, root: str = "root", *, triggers: tuple[str, ...] = ()) -> ConstraintMaker:
        """A GBNF grammar, or llguidance's notation if the text begins with %llguidance.

        With `triggers` the text is free until one of them comes up; the grammar then accepts it and what follows.
        """
        return self._maker(GrammarSpec(GrammarKind.GBNF, source=text, lazy=bool(triggers), triggers=triggers), root)

    def json_schema(self, schema: Any, *, triggers: tuple[str, ...] = ()) -> ConstraintMaker:
        """JSON values that a schema (parsed JSON) accepts."""
        return self.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, schema=schema, lazy=bool(triggers), triggers=triggers))

    def json_object(self) -> ConstraintMaker:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def prepare(self) -> Vocabulary:
        """Read the vocabulary now, which takes a second or two, instead of at the first grammar."""
        with self._lock:
            return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer)

    def _maker(self, spec: GrammarSpec, root: str) -> ConstraintMaker:
        vocabulary = self.prepare()
        what = "json_schema" if spec.kind is GrammarKind.JSON_SCHEMA else "grammar"
        matcher = self._matcher(self._lark(spec, root), what)
        if spec.lazy or spec.after:
            return lambda: LazyConstraint(spec, matcher, vocabulary)
        return lambda: GrammarConstraint(matcher.deep_copy(), vocabulary, digits_of(spec, vocabulary))

    def _lark(self, spec: GrammarSpec, root: str) -> str:
        vocabulary = self._vocabulary
        if spec.kind is GrammarKind.JSON_SCHEMA:
            return f"{HEADER}start: %json {prepare_schema(spec.schema)}\n"
        if spec.kind is GrammarKind.TREE:
            if spec.tree is None:
                raise GrammarError("grammar: there is none")
            return to_lark(tree_rules(spec.tree, vocabulary.special), "root")
        if spec.source.lstrip().startswith(_LARK_MARK):
            return spec.source
        return to_lark(parse_gbnf(spec.source, vocabulary.token_of, vocabulary.n_vocab), root)

    def _matcher(self, lark: str, what: str) -> LLMatcher:
        with self._lock:
            found = self._kept.get(lark)
            if found is not None:
                self._kept.move_to_end(lark)
                return found
        matcher = self._compiled(lark, what)
        with self._lock:
            self._kept[lark] = matcher
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compiled(self, lark: str, what: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._vocabulary.native, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"{what}: {_readable(matcher.get_error())}")
        first = GrammarConstraint(matcher.deep_copy(), self._vocabulary)
        try:
            allowed = bool(first.mask().any())
        except GrammarError as e:
            if "NoExtension" in str(e):
                raise GrammarError(f"{what}: no text at all fulfils it") from None
            raise GrammarError(f"{what}: {e}") from None
        if not allowed:
            raise GrammarError(f"{what}: no text at all fulfils it")
        return matcher


def _readable(message: str) -> str:
    lines = [line.strip() for line in message.split("\n<state>")[0].splitlines()]
    described = [line for line in lines if line.startswith("error:")]
    return (described[0].removeprefix("error:").strip() if described else first_line(message))[:300]
