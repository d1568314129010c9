"""A grammar as data: rules by name, their bodies as trees of text, character sets and references."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.errors import UsageError
from ikcli.grammar.spec import Pattern

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint code point ranges, both ends included."""

LAST_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


class GrammarError(UsageError):
    """A grammar or schema that cannot be used; the text says where and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Lit:
    """Text as it is."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class RuleRef:
    """Another rule."""

    name: str
    position: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """One token of the vocabulary, or any but one."""

    id: int
    negated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """Items one after the other; without items, the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alt:
    """One of several items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RepeatNode:
    """An item from `low` to `high` times; None is unbounded."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False)
class UntilNode:
    """Any text up to and including the first `end`, with none of `others` before it.

    Text that begins with one of `unless` does not match.
    """

    end: Pattern
    unless: tuple[Pattern, ...] = ()
    others: tuple[Pattern, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A regular part that stays one lexeme."""

    item: Node


@dataclass(frozen=True, slots=True, eq=False)
class Json:
    """A JSON value; `schema` is a checked JSON schema, serialized."""

    schema: str


Node = UntilNode | Whole | Json | Lit | Chars | RuleRef | Token | Seq | Alt | RepeatNode
Rules = dict[str, Node]

EMPTY = Seq(())


def children(node: Node) -> tuple[Node, ...]:
    """Return the parts of a node."""
    if isinstance(node, Seq | Alt):
        return node.items
    return (node.item,) if isinstance(node, RepeatNode | Whole) else ()


def seq(*items: Node) -> Node:
    """Return a sequence, or the item itself if there is only one."""
    return items[0] if len(items) == 1 else Seq(items)


def alt(*items: Node) -> Node:
    """Return alternatives, or the item itself if there is only one."""
    return items[0] if len(items) == 1 else Alt(items)


def char_ranges(pairs: list[tuple[int, int]], negated: bool) -> Ranges:
    """Merge ranges and take out surrogates; `negated` gives all other characters."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    if negated:
        edges = [-1, *(edge for pair in merged for edge in pair), LAST_CODE_POINT + 1]
        merged = [(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 <= b - 1]
    parts: list[tuple[int, int]] = []
    for low, high in merged:
        for part in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if part[0] <= part[1]:
                parts.append(part)
    return tuple(parts)
