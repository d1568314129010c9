"""Turn the trees of chats (spec.py) into rules; markers become control tokens where the vocabulary has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ikcli.grammar import nodes, spec
from ikcli.grammar.nodes import EMPTY, Chars, Lit, Node, Rules, Seq, alt, char_ranges, seq

_ANY = Chars(char_ranges([], negated=True))

Special = Callable[[str], int | None]
JsonOf = Callable[[spec.Schema], str]


@dataclass(frozen=True, slots=True)
class _Use:
    """State shared by all nodes of a tree.

    `kept` caches free texts: large expressions that many arguments share.
    """

    special: Special
    json_of: JsonOf
    kept: dict[object, nodes.UntilNode] = field(default_factory=dict)


def tree_rules(tree: spec.Node, special: Special, json_of: JsonOf) -> Rules:
    """Return one rule `root` for a tree.

    `special` gives the id of the control token with a text, `json_of` a schema as the grammar library takes it.
    """
    return {"root": _node(tree, _Use(special, json_of))}


def _node(tree: spec.Node, use: _Use) -> Node:
    if isinstance(tree, spec.Literal):
        return Lit(tree.text)
    if isinstance(tree, spec.Marker):
        token = use.special(tree.text)
        return Lit(tree.text) if token is None else alt(nodes.Token(token), Lit(tree.text))
    if isinstance(tree, spec.Chars):
        chars = Chars(char_ranges([(ord(r[0]), ord(r[-1])) for r in tree.ranges], negated=False))
        return chars if tree.least == tree.most == 1 else nodes.RepeatNode(chars, tree.least, tree.most)
    if isinstance(tree, spec.Schema):
        return nodes.Json(use.json_of(tree))
    if isinstance(tree, spec.Until):
        return _until(tree, use)
    if isinstance(tree, spec.Sequence):
        return _whole(tree, use) if tree.whole else _flat([_node(part, use) for part in tree.parts])
    if isinstance(tree, spec.Choice):
        return alt(*(_node(option, use) for option in tree.options))
    return _repeat(tree, use)


def _until(tree: spec.Until, use: _Use) -> Node:
    """Build text and its end; with followers, in pieces up to each `end`, of which only the last has a follower.

    Small lexemes: as one regular expression this takes the grammar library millions of states.
    """
    token = use.special(tree.end)
    if token is not None:
        return seq(nodes.RepeatNode(_ANY, 0, None), nodes.Token(token))
    end: spec.Pattern = (tree.end,)
    within = tuple(pattern for pattern in tree.followers if spec.Gap.END not in pattern)
    if tree.nested is None:
        first: Node = _text(use, end)
        more: Node = _text(use, end, within)
    else:
        opening, closing = tree.nested
        inside = _text(use, closing)
        last = _text(use, end, (), (opening,))
        example = seq(_text(use, opening, (), (end,)), inside)
        first = seq(nodes.RepeatNode(example, 0, None), last)
        more = alt(
            _text(use, end, within, (opening,)),
            seq(_text(use, opening, within, (end,)), inside, first),
        )
    return seq(first, nodes.RepeatNode(more, 0, None)) if within else first


def _text(
    use: _Use,
    end: spec.Pattern,
    unless: tuple[spec.Pattern, ...] = (),
    others: tuple[spec.Pattern, ...] = (),
) -> nodes.UntilNode:
    key = (end, unless, others)
    if key not in use.kept:
        use.kept[key] = nodes.UntilNode(*key)
    return use.kept[key]


def _whole(tree: spec.Sequence, use: _Use) -> Node:
    """Build one lexeme or, where markers are tokens of the vocabulary, these and lexemes between them."""
    texts = [_node(spec.Literal(p.text) if isinstance(p, spec.Marker) else p, use) for p in tree.parts]
    plain: Node = nodes.Whole(_flat(texts))
    tokens = [use.special(p.text) if isinstance(p, spec.Marker) else None for p in tree.parts]
    if all(token is None for token in tokens):
        return plain
    parts: list[Node] = []
    pending: list[Node] = []
    for text, token in zip(texts, tokens, strict=True):
        if token is None:
            pending.append(text)
            continue
        parts += [nodes.Whole(_flat(pending)), nodes.Token(token)] if pending else [nodes.Token(token)]
        pending = []
    return alt(seq(*parts, *pending), plain)


def _flat(items: list[Node]) -> Node:
    """Flatten nested sequences, so that neighbours can share a lexeme."""
    flat: list[Node] = []
    for item in items:
        flat += item.items if isinstance(item, Seq) else [item]
    return seq(*flat)


def _repeat(tree: spec.Repeat, use: _Use) -> Node:
    part = _node(tree.part, use)
    if tree.between is None:
        return nodes.RepeatNode(part, tree.least, tree.most)
    if tree.most == 0:
        return EMPTY
    more = nodes.RepeatNode(
        seq(_node(tree.between, use), part),
        max(tree.least - 1, 0),
        None if tree.most is None else tree.most - 1,
    )
    some = seq(part, more)
    return some if tree.least > 0 else nodes.RepeatNode(some, 0, 1)
