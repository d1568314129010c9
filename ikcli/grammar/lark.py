"""Write rules in llguidance's Lark-like notation: upper-case terminals are lexemes, lower-case rules are above them."""

from __future__ import annotations

import json

from ikcli.grammar.lexemes import Above, Lexeme, Plan
from ikcli.grammar.nodes import (
    Alt,
    Chars,
    GrammarError,
    Json,
    Lit,
    Node,
    RepeatNode,
    RuleRef,
    Rules,
    Seq,
    Token,
    UntilNode,
    Whole,
)
from ikcli.grammar.rules import check_rules, simplify, without_dead_ends
from ikcli.grammar.spec import Pattern

# No text forces tokens: every tokenization of it is allowed, as in llama.cpp.
HEADER = '%llguidance {"no_forcing": true}\n'


def to_lark(rules: Rules, root: str) -> str:
    """Write the grammar for llguidance; raise GrammarError if rules are missing, too large or endless."""
    check_rules(rules, root)
    rules, regular = simplify(without_dead_ends(rules, root), root)
    plan = Plan(rules, regular, root)
    plan.settle()
    return _Writer(plan).text()


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._lexemes: dict[int, str] = {}
        self._rule_names: dict[str, str] = {}

    def text(self) -> str:
        names = {name: f"r{i}" for i, name in enumerate(self._plan.productions)}
        self._rule_names = names
        for name, production in self._plan.productions.items():
            self._lines.append(f"{names[name]}: {self._above(production)}")
        return "\n".join([HEADER + f"start: {names[self._plan.root]}", *self._lines, ""])

    def _above(self, part: Above) -> str:
        if isinstance(part, Lexeme):
            return self._lexeme(part)
        if part.kind == "rule":
            return self._rule_names[part.name]
        if part.kind == "alt":
            return "(" + " | ".join(self._above(item) for item in part.items) + ")"
        if part.kind == "repeat":
            assert isinstance(part.node, RepeatNode)
            return _repeated(f"({self._above(part.items[0])})", part.node)
        if part.kind == "seq":
            return "(" + (" ".join(self._above(item) for item in part.items) or '""') + ")"
        if isinstance(part.node, Token):
            return f"<[{'^' if part.node.negated else ''}{part.node.id}]>"
        if isinstance(part.node, Json):
            name = f"j{len(self._lines)}"
            self._lines.append(f"{name}: %json {part.node.schema}")
            return name
        raise GrammarError("grammar: a part of it cannot be written for the grammar library")

    def _lexeme(self, lexeme: Lexeme) -> str:
        """Name the terminal of a lexeme; one that may be empty becomes an optional non-empty terminal."""
        known = self._lexemes.get(lexeme.index)
        if known is None:
            known = self._lexemes[lexeme.index] = self._new_lexeme(lexeme)
        return known

    def _new_lexeme(self, lexeme: Lexeme) -> str:
        name = f"L{len(self._lines)}"
        expression = self._regular(lexeme.node)
        if not self._plan.nullable(lexeme.node):
            self._lines.append(f"{name}: {expression}")
            return name
        if expression in ('("")', '""'):
            return '""'
        self._lines.append(f"{name}: ({expression}) & /(?s:.+)/")
        return f"({name})?"

    def _regular(self, node: Node) -> str:
        if isinstance(node, Lit):
            return json.dumps(node.text)
        if isinstance(node, Chars):
            return f"/{_char_class(node)}/"
        if isinstance(node, RuleRef):
            return self._terminal(node.name)
        if isinstance(node, RepeatNode):
            return _repeated(f"({self._regular(node.item)})", node)
        if isinstance(node, Seq):
            return "(" + (" ".join(self._regular(item) for item in node.items) or '""') + ")"
        if isinstance(node, Alt):
            return "(" + " | ".join(self._regular(item) for item in node.items) + ")"
        if isinstance(node, Whole):
            return self._regular(node.item)
        if isinstance(node, UntilNode):
            return _until(node)
        raise GrammarError("grammar: a part of it is not regular")

    def _terminal(self, rule: str) -> str:
        name = self._terminals.get(rule)
        if name is None:
            name = self._terminals[rule] = f"T{len(self._terminals)}"
            self._lines.append(f"{name}: {self._regular(self._plan.rules[rule])}")
        return name


def _until(node: UntilNode) -> str:
    """Write an expression for text that ends with the first match of the end."""
    ends = _any_pattern((node.end, *node.others))
    parts = [f"(/(?s:.*)/ {_any_pattern((node.end,))})", f"(~(/(?s:.*)/ {ends} /(?s:.+)/))"]
    if node.unless:
        parts.append(f"(~({_any_pattern(node.unless)} /(?s:.*)/))")
    return "(" + " & ".join(parts) + ")"


def _any_pattern(patterns: tuple[Pattern, ...]) -> str:
    return "(" + " | ".join(_pattern(pattern) for pattern in patterns) + ")"


def _pattern(pattern: Pattern) -> str:
    return "(" + " ".join(json.dumps(p) if isinstance(p, str) else f"/{p.value}/" for p in pattern) + ")"


def _repeated(inner: str, node: RepeatNode) -> str:
    if (node.low, node.high) == (0, 1):
        return f"{inner}?"
    if node.high is None and node.low < 2:
        return inner + "*+"[node.low]
    if node.high == 0:
        return '""'
    return f"{inner}{{{node.low},{'' if node.high is None else node.high}}}"


def _char_class(chars: Chars) -> str:
    def code(value: int) -> str:
        return f"\\x{{{value:X}}}"

    return "[" + "".join(code(a) if a == b else f"{code(a)}-{code(b)}" for a, b in chars.ranges) + "]"
