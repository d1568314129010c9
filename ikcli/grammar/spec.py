"""Describe the constraint that a chat puts on the sampler: a tree of literals, JSON values and repeats, and its start.

`ikcli.chat` builds the tree per template family; `ikcli.grammar` turns it into a mask over the vocabulary.
A lazy grammar lets text come first: it applies from the first trigger text on, trigger included.
The tree does not depend on a vocabulary; a marker is a text that may be one control token of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Marker:
    """Exactly this text, which may also be a control token of the vocabulary (`<tool_call>`)."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """From `least` to `most` characters of `ranges`: each a character, or the first and the last of a range ("az")."""

    ranges: tuple[str, ...]
    least: int = 1
    most: int = 1


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON value that a JSON schema accepts (draft 2020-12, `$ref` within the document).

    `lenient`: keywords that cannot be followed are left out instead of refused. `owner`: the tool whose schema it is.
    """

    schema: Mapping[str, Any] | bool
    lenient: bool = False
    owner: str = ""


class Gap(enum.Enum):
    """Text allowed between the texts of a pattern."""

    SPACES = r"[ \t\r\n]*"
    NAME = r"[^ \t\r\n\"<>]+"
    KEY = r"[A-Za-z0-9_.-]+"
    END = ""
    """The end of all text."""


Pattern = tuple[str | Gap, ...]
"""Texts and gaps, one after the other."""


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to and including the first `end` (a marker).

    With `followers`, up to the first `end` that one of them follows; any other `end` is part of the text. So is every
    `end` between the two patterns of `nested`, which enclose an example of a call within a text.
    """

    end: str
    followers: tuple[Pattern, ...] = ()
    nested: tuple[Pattern, Pattern] | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """The parts one after the other; no parts: nothing.

    `whole`: literals, markers and characters that form one lexeme. What follows an `Until` with followers has to be
    whole up to the point that distinguishes it from more text.
    """

    parts: tuple[Node, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Exactly one of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` from `least` to `most` times (None: without limit), `between` two of them."""

    part: Node
    least: int = 0
    most: int | None = None
    between: Node | None = None


Node = Literal | Marker | Chars | Schema | Until | Sequence | Choice | Repeat


def parts_of(tree: Node) -> tuple[Node, ...]:
    """Return the nodes directly within a node."""
    if isinstance(tree, Sequence):
        return tree.parts
    if isinstance(tree, Choice):
        return tree.options
    if isinstance(tree, Repeat):
        return (tree.part,) if tree.between is None else (tree.part, tree.between)
    return ()


class GrammarKind(enum.Enum):
    """The source of a grammar."""

    TREE = "tree"
    JSON_SCHEMA = "json_schema"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the generated text. Exactly the field of its `kind` is set: `tree`, `schema` or `source` (GBNF).

    `after`: the text is free up to and including its first occurrence (the end of thinking that the prompt opened).
    `lazy`: the text is free until one of `triggers` appears; the grammar then accepts the trigger and what follows.
    Triggers within `reasoning` (its opening and closing text) do not count; `at_start` triggers only count where the
    answer begins (after reasoning and white space).
    """

    kind: GrammarKind
    tree: Node | None = None
    schema: Mapping[str, Any] | bool | None = None
    source: str = ""
    lazy: bool = False
    triggers: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    after: str = ""
    reasoning: tuple[str, str] | None = None


class TriggerWatcher:
    """Watches generated text for the point from which the grammar of a spec applies."""

    def __init__(self, spec: GrammarSpec) -> None:
        """Watch for the start of `spec`; without `lazy` and `after` it applies at once."""
        self._spec = spec
        self._text = ""
        self._waits_for = spec.after
        self._in_reasoning = False
        self._at_start = True
        self.active = not spec.lazy and not spec.after

    def feed(self, text: str) -> str | None:
        """Return the text that the grammar has to accept once `text` starts it (possibly ""), otherwise None."""
        if self.active:
            raise RuntimeError("the grammar holds already")
        self._text += text
        while not self.active:
            before = (self._waits_for, self._in_reasoning, len(self._text))
            if self._waits_for:
                if not self._skip_past(self._waits_for):
                    return None
                self._waits_for = ""
            elif not self._spec.lazy:
                self.active = True
            elif self._in_reasoning and self._spec.reasoning:
                self._waits_for, self._in_reasoning = self._spec.reasoning[1], False
            else:
                self._look_for_trigger()
            if before == (self._waits_for, self._in_reasoning, len(self._text)) and not self.active:
                return None
        return self._text

    def _skip_past(self, end: str) -> bool:
        at = self._text.find(end)
        if at < 0:
            self._text = self._text[-len(end) :]
            return False
        self._text = self._text[at + len(end) :]
        return True

    def _look_for_trigger(self) -> None:
        spec = self._spec
        opening = spec.reasoning[0] if spec.reasoning else ""
        if self._at_start:
            begin = self._text.lstrip()
            if not begin:
                return
            for trigger in spec.at_start:
                if begin.startswith(trigger):
                    self._text, self.active = begin, True
                    return
            if any(trigger.startswith(begin) for trigger in (*spec.at_start, opening) if trigger):
                return
        found = [(at, t) for t in (*spec.triggers, opening) if t and (at := self._text.find(t)) >= 0]
        if not found:
            self._at_start = False
            longest = max((len(t) for t in (*spec.triggers, opening)), default=1)
            self._text = self._text[-longest:]
            return
        at, which = min(found, key=lambda f: (f[0], -len(f[1])))
        if which != opening:
            self._text, self.active = self._text[at:], True
            return
        self._at_start = self._at_start and not self._text[:at].strip()
        self._text, self._in_reasoning = self._text[at + len(which) :], True
