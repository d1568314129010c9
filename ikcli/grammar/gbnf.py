"""Parse GBNF, llama.cpp's grammar notation, to rules (grammars/README.md of llama.cpp).

    name ::= alternative | alternative      sequences, (groups), "text", [a-z], [^a-z], . and <[token id]>, <token>
    item* item+ item? item{m} item{m,} item{m,n}                            # comment

A rule ends with its line, except inside groups and next to `|`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ikcli.grammar.nodes import (
    LAST_CODE_POINT,
    Chars,
    GrammarError,
    Lit,
    Node,
    RepeatNode,
    RuleRef,
    Rules,
    Token,
    alt,
    char_ranges,
    seq,
)

MAX_NESTING = 60
MAX_REPETITIONS = 100_000
MAX_CHARACTERS = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = re.compile(r"[0-9]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEXT_LINE_BAR = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*\|")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}

TokenOf = Callable[[str], int | None]
"""Gives the id of the token with a text like `<|end|>`, or None."""


def parse_gbnf(text: str, token_of: TokenOf | None = None, n_vocab: int = 0) -> Rules:
    """Parse rules by name; raise GrammarError with line and column for an error in the notation."""
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(f"the grammar is {len(text)} characters long; at most {MAX_CHARACTERS} are accepted")
    return _Parser(text, token_of or (lambda _: None), n_vocab).rules()


def place(text: str, position: int) -> str:
    """Format a position in a text as `line 3, column 7`."""
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - text.rfind(chr(10), 0, position)}"


class _Parser:
    def __init__(self, text: str, token_of: TokenOf, n_vocab: int) -> None:
        self._text = text
        self._at = 0
        self._token_of = token_of
        self._n_vocab = n_vocab
        self._nesting = 0

    def rules(self) -> Rules:
        found: Rules = {}
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            start = self._at
            name = self._name("a rule name")
            if name in found:
                raise self._error(f"rule {name} is defined twice", start)
            self._skip(_BLANK)
            if not self._text.startswith("::=", self._at):
                raise self._error(f"expected ::= after {name}")
            self._at += 3
            self._skip(_BLANK_LINES)
            found[name] = self._alternatives()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error(f"expected the end of rule {name}, not {self._text[self._at]!r}")
            self._skip(_BLANK_LINES)
        return found

    def _alternatives(self) -> Node:
        items = [self._sequence()]
        while self._peek() == "|" or (not self._nesting and _NEXT_LINE_BAR.match(self._text, self._at)):
            self._skip(_BLANK_LINES)
            self._at += 1
            self._skip(_BLANK_LINES)
            items.append(self._sequence())
        return alt(*items)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            character = self._peek()
            if character and character in "*+?{":
                if not items:
                    raise self._error(f"{character} has nothing to repeat")
                items[-1] = self._repetition(items[-1])
            else:
                item = self._item(character)
                if item is None:
                    return seq(*items)
                items.append(item)
            self._skip(_BLANK_LINES if self._nesting else _BLANK)

    def _item(self, character: str) -> Node | None:
        if character == '"':
            return self._literal()
        if character == "[":
            return self._char_class()
        if character == ".":
            self._at += 1
            return Chars(char_ranges([], negated=True))
        if character == "(":
            return self._group()
        if character in ("<", "!"):
            return self._token()
        if character and _NAME.match(character):
            start = self._at
            return RuleRef(self._name("a rule name"), start)
        return None

    def _group(self) -> Node:
        start = self._at
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._error(f"brackets are nested more than {MAX_NESTING} deep")
        self._at += 1
        self._skip(_BLANK_LINES)
        inner = self._alternatives()
        if self._peek() != ")":
            if self._at >= len(self._text):
                raise self._error("this bracket is never closed", start)
            raise self._error(f"expected ) but found {self._text[self._at]!r}")
        self._at += 1
        self._nesting -= 1
        return inner

    def _literal(self) -> Node:
        start = self._at
        self._at += 1
        characters = []
        while self._peek() != '"':
            if self._peek() in ("", "\n"):
                raise self._error("this text has no closing quote", start)
            characters.append(chr(self._character()))
        self._at += 1
        return Lit("".join(characters))

    def _char_class(self) -> Node:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        pairs = []
        while self._peek() != "]":
            if self._peek() in ("", "\n"):
                raise self._error("this character class has no closing bracket", start)
            low_at, low = self._at, self._character()
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._character()
            if high < low:
                raise self._error(f"the range {self._text[low_at : self._at]} is the wrong way round", low_at)
            pairs.append((low, high))
        self._at += 1
        ranges = char_ranges(pairs, negated)
        if not ranges:
            raise self._error("no character is in this class", start)
        return Chars(ranges)

    def _character(self) -> int:
        start = self._at
        character = self._text[start]
        self._at += 1
        if character != "\\":
            code = ord(character)
        else:
            escape = self._peek()
            self._at += 1
            if escape in _ESCAPES:
                return ord(_ESCAPES[escape])
            if escape not in _HEX_ESCAPES:
                raise self._error(f"unknown escape \\{escape}", start)
            digits = self._text[self._at : self._at + _HEX_ESCAPES[escape]]
            if len(digits) < _HEX_ESCAPES[escape] or not set(digits) <= _HEX_DIGITS:
                raise self._error(f"\\{escape} needs {_HEX_ESCAPES[escape]} hexadecimal digits", start)
            self._at += len(digits)
            code = int(digits, 16)
        if code > LAST_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"U+{code:04X} is not a character", start)
        return code

    def _repetition(self, item: Node) -> Node:
        start = self._at
        character = self._peek()
        self._at += 1
        if character in "*+?":
            return RepeatNode(item, 1 if character == "+" else 0, 1 if character == "?" else None)
        self._skip(_BLANK_LINES)
        low = self._number()
        high: int | None = low
        self._skip(_BLANK_LINES)
        if self._peek() == ",":
            self._at += 1
            self._skip(_BLANK_LINES)
            high = None if self._peek() == "}" else self._number()
            self._skip(_BLANK_LINES)
        if self._peek() != "}":
            raise self._error("a repetition is {m}, {m,} or {m,n}", start)
        self._at += 1
        if high is not None and high < low:
            raise self._error(f"the repetition {{{low},{high}}} ends before it begins", start)
        return RepeatNode(item, low, high)

    def _number(self) -> int:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            raise self._error("expected a number of repetitions")
        if len(match[0]) > 9 or int(match[0]) > MAX_REPETITIONS:
            raise self._error(f"{match[0][:12]} repetitions are too many; at most {MAX_REPETITIONS} are accepted")
        self._at = match.end()
        return int(match[0])

    def _token(self) -> Node:
        start = self._at
        negated = self._peek() == "!"
        self._at += negated
        end = self._text.find(">", self._at)
        written = self._text[self._at : end + 1]
        if not written.startswith("<") or end < 0 or "\n" in written:
            raise self._error("a token is <[id]> or <text>", start)
        self._at = end + 1
        by_id = re.fullmatch(r"<\[([0-9]{1,9})\]>", written)
        token = int(by_id[1]) if by_id else self._token_of(written)
        if token is None:
            raise self._error(f"{written} is not one token of this model's vocabulary", start)
        if not token < self._n_vocab:
            raise self._error(f"token {token} is outside the vocabulary of {self._n_vocab}", start)
        return Token(token, negated)

    def _name(self, what: str) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            found = repr(self._text[self._at]) if self._at < len(self._text) else "the end"
            raise self._error(f"expected {what}, not {found}")
        self._at = match.end()
        return match[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match is not None else self._at

    def _error(self, message: str, position: int | None = None) -> GrammarError:
        return GrammarError(f"grammar, {place(self._text, self._at if position is None else position)}: {message}")
