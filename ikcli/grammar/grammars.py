"""Compile grammars and schemas for one vocabulary; all their errors are raised here."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from ikcli.grammar.constraint import GrammarConstraint, LazyConstraint, digits_of, first_line
from ikcli.grammar.faults import Faults, TooManyError, has_end
from ikcli.grammar.gbnf import parse_gbnf
from ikcli.grammar.lark import HEADER, to_lark
from ikcli.grammar.nodes import GrammarError
from ikcli.grammar.pointers import pointer_text
from ikcli.grammar.schema import KeywordError, Left, prepare_schema, serialized, unconstrained
from ikcli.grammar.spec import GrammarKind, GrammarSpec, Schema
from ikcli.grammar.tree import JsonOf, tree_rules
from ikcli.grammar.vocabulary import Vocabulary
from ikcli.log import notice_once
from ikcli.tokenizer import Tokenizer

ConstraintMaker = Callable[[], GrammarConstraint | LazyConstraint]

_LARK_MARK = "%llguidance"
_MOST_KEPT, _MOST_TOLD = 32, 1000
_ENDLESS = "no text at all fulfils it, as it refers to itself on every path"
_PLACE = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")


class Grammars:
    """Compiles and caches grammars for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, report: Callable[[str], None] = notice_once) -> None:
        """Compile for one tokenizer; `report` hears once what was left out of the schemas of tools."""
        self._tokenizer = tokenizer
        self._report = report
        self._lock = Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._told: list[str] = []

    def compile(self, spec: GrammarSpec) -> ConstraintMaker:
        """Compile `spec` to a maker of constraints, one per generation; raise GrammarError if it is wrong.

        Takes milliseconds, up to a few seconds for a hostile grammar: not for the thread of the engine.
        """
        return self._maker(spec, "root")

    def gbnf(self, text: str, root: str = "root", *, triggers: tuple[str, ...] = ()) -> ConstraintMaker:
        """Compile a GBNF grammar, or llguidance's notation if the text begins with %llguidance.

        With `triggers` the text is free until one of them comes up; the grammar then accepts it and what follows.
        """
        return self._maker(GrammarSpec(GrammarKind.GBNF, source=text, lazy=bool(triggers), triggers=triggers), root)

    def json_schema(self, schema: Any, *, triggers: tuple[str, ...] = ()) -> ConstraintMaker:
        """Compile a JSON schema (parsed JSON)."""
        return self.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, schema=schema, lazy=bool(triggers), triggers=triggers))

    def json_object(self) -> ConstraintMaker:
        """Compile a grammar for any JSON object."""
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
        matcher = self._matcher(spec, root)
        if spec.lazy or spec.after:
            return lambda: LazyConstraint(spec, matcher, vocabulary)
        return lambda: GrammarConstraint(matcher.deep_copy(), vocabulary, digits_of(spec, vocabulary))

    def _matcher(self, spec: GrammarSpec, root: str) -> LLMatcher:
        left: list[str] = []
        all_end: list[bool] = []
        lark = self._lark(spec, root, lambda schema: self._prepared(schema, left, all_end))
        with self._lock:
            found = self._kept.get(lark)
            if found is not None:
                self._kept.move_to_end(lark)
                return found
        try:
            if not all(all_end):
                raise GrammarError(_ENDLESS)
            matcher = self._compiled(lark, "grammar")
        except GrammarError as error:
            if spec.kind is GrammarKind.GBNF:
                raise
            problem, left = _reason(error), []
            mended = self._lark(spec, root, lambda schema: self._mended(schema, left, problem))
            matcher = self._compiled(mended, "grammar")
        self._tell(left)
        with self._lock:
            self._kept[lark] = matcher
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _tell(self, lines: list[str]) -> None:
        """Report the lines that were not reported recently."""
        with self._lock:
            new = [line for line in dict.fromkeys(lines) if line not in self._told]
            self._told = [*self._told, *new][-_MOST_TOLD:]
        for line in new:
            self._report(line)

    def _lark(self, spec: GrammarSpec, root: str, json_of: JsonOf) -> str:
        vocabulary = self._vocabulary
        if spec.kind is GrammarKind.JSON_SCHEMA:
            return f"{HEADER}start: %json {json_of(Schema(spec.schema))}\n"  # type: ignore[arg-type]
        if spec.kind is GrammarKind.TREE:
            if spec.tree is None:
                raise GrammarError("grammar: there is none")
            return to_lark(tree_rules(spec.tree, vocabulary.special, json_of), "root")
        if spec.source.lstrip().startswith(_LARK_MARK):
            return spec.source
        return to_lark(parse_gbnf(spec.source, vocabulary.token_of, vocabulary.n_vocab), root)

    def _prepared(self, schema: Schema, left: list[str], all_end: list[bool]) -> str:
        """Prepare the schema for the library, as far as possible without compiling it."""
        prepared, gone = prepare_schema(schema.schema, lenient=schema.lenient)
        left += [_line(schema, one) for one in gone]
        all_end.append(has_end(prepared))
        return serialized(prepared)

    def _mended(self, schema: Schema, left: list[str], problem: str) -> str:
        """Return a schema that compiles; without leniency raise KeywordError with the place of what does not."""
        prepared, gone = prepare_schema(schema.schema, lenient=schema.lenient)
        try:
            for fault in Faults(prepared, self._problem).take_out():
                if not schema.lenient:
                    raise KeywordError(fault.path, fault.reason)
                gone.append(Left(pointer_text(fault.path), fault.reason))
        except TooManyError:
            if not schema.lenient:
                raise GrammarError(f"json_schema: {problem}") from None
            gone = [Left("#", problem)]
            prepared = unconstrained(prepared)
        left += [_line(schema, one) for one in gone]
        return serialized(prepared)

    def _problem(self, prepared: Mapping[str, Any]) -> str:
        if not has_end(prepared):
            return _ENDLESS
        try:
            self._compiled(f"{HEADER}start: %json {serialized(prepared)}\n", "grammar")
        except GrammarError as e:
            return _reason(e)
        return ""

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


def _reason(error: GrammarError) -> str:
    """Return why a schema does not compile, without the position in the generated text."""
    return _PLACE.sub("", str(error).removeprefix("grammar: "))


def _line(schema: Schema, left: Left) -> str:
    whose = f"tool {schema.owner}" if schema.owner else "tools"
    return f"{whose}: the schema's {left.place} is not enforced: {left.reason}"


def _readable(message: str) -> str:
    lines = [line.strip() for line in message.split("\n<state>")[0].splitlines()]
    described = [line for line in lines if line.startswith("error:")]
    return (described[0].removeprefix("error:").strip() if described else first_line(message))[:300]
