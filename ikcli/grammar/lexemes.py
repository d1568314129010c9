"""Choose which parts of a grammar become lexemes: regular expressions that the lexer matches as far as it can.

llguidance's lexer is greedy, GBNF is not: with `[a-z]* "x"` as two lexemes, the first would swallow every x. A lexeme
is safe if no character that may follow it can also extend its text, within it or within another lexeme possible there.
`Plan.settle` splits the unsafe ones, down to single characters if necessary.
A greedy lexer never accepts a wrong text, so if the analysis gives up, the worst result is a grammar that allows less.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from ikcli.grammar.nodes import (
    LAST_CODE_POINT,
    Alt,
    Chars,
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
    children,
)
from ikcli.grammar.rules import walk

_MAX_STATES = 4000
_MAX_POSITIONS = 6000
_LONGEST_COUNTED = 8
_MAX_ROUNDS = 40
_ANY = Chars(((0, LAST_CODE_POINT),))
_JSON_STARTS = Chars(((0x22, 0x22), (0x2D, 0x2D), (0x30, 0x39), (0x5B, 0x5B), (0x66, 0x66), (0x6E, 0x6E),
                      (0x74, 0x74), (0x7B, 0x7B)))  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """A regular part that the lexer matches as a whole."""

    node: Node
    index: int
    key: object


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A node of the grammar above lexemes: kind `seq`, `alt`, `repeat` (with `node`) or a leaf of `node`."""

    kind: str
    items: tuple[Part | Lexeme, ...] = ()
    node: Node | None = None
    name: str = ""


Above = Part | Lexeme


@dataclass(slots=True)
class Plan:
    """A grammar as productions over lexemes."""

    rules: Rules
    regular: frozenset[str]
    root: str
    split: set[object] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    lexemes: list[Lexeme] = field(default_factory=list)
    productions: dict[str, Above] = field(default_factory=dict)
    _by_key: dict[object, Lexeme] = field(default_factory=dict)
    _nullable: dict[str, bool] = field(default_factory=dict)

    def settle(self) -> None:
        """Make productions, and split lexemes until all are safe or the analysis gives up."""
        for _ in range(_MAX_ROUNDS):
            self._build()
            unsafe = _Analysis(self).unsafe()
            if not unsafe:
                return
            for lexeme in unsafe:
                self.split.add(lexeme.key)
                if isinstance(lexeme.node, RuleRef):
                    self.opened.add(lexeme.node.name)

    def nullable(self, node: Node) -> bool:
        """Return True if a regular part matches the empty text."""
        if isinstance(node, RuleRef):
            if node.name not in self._nullable:
                self._nullable[node.name] = self.nullable(self.rules[node.name])
            return self._nullable[node.name]
        if isinstance(node, Lit):
            return not node.text
        if isinstance(node, RepeatNode):
            return node.low == 0 or self.nullable(node.item)
        if isinstance(node, Seq | Whole):
            return all(self.nullable(item) for item in children(node))
        return isinstance(node, Alt) and any(self.nullable(item) for item in node.items)

    def _build(self) -> None:
        self.lexemes, self.productions, self._by_key = [], {}, {}
        waiting = [self.root]
        while waiting:
            name = waiting.pop()
            if name in self.productions:
                continue
            production = self.productions[name] = self._above(self.rules[name])
            stack: list[Above] = [production]
            while stack:
                top = stack.pop()
                if isinstance(top, Part):
                    stack.extend(top.items)
                    if top.kind == "rule":
                        waiting.append(top.name)

    def _is_regular(self, node: Node) -> bool:
        """Return whether a node can be part of a lexeme; text that followers can end is always its own lexeme."""
        return not any(
            isinstance(n, Token | Json)
            or (isinstance(n, UntilNode) and (n.unless or n.others))
            or (isinstance(n, RuleRef) and (n.name not in self.regular or n.name in self.opened))
            for n in walk(node)
        )

    def _above(self, node: Node) -> Above:
        if self._is_regular(node) and id(node) not in self.split:
            return self._lexeme(node, id(node))
        if isinstance(node, RuleRef):
            return Part("rule", name=node.name)
        if isinstance(node, Lit):
            return Part("seq", tuple(self._lexeme(Lit(c), (id(node), i)) for i, c in enumerate(node.text)))
        if isinstance(node, Seq):
            return Part("seq", self._sequence(node))
        if isinstance(node, Alt):
            return Part("alt", self._alternatives(node))
        if isinstance(node, RepeatNode):
            return Part("repeat", (self._above(node.item),), node)
        if isinstance(node, UntilNode):
            return self._lexeme(node, id(node))
        return Part("leaf", node=node)

    def _sequence(self, node: Seq) -> tuple[Above, ...]:
        """Join neighbouring regular items into one lexeme."""
        parts: list[Above] = []
        at = 0
        while at < len(node.items):
            end = at
            while end < len(node.items) and self._is_regular(node.items[end]) and id(node.items[end]) not in self.split:
                end += 1
            key = (id(node), at, end)
            if end - at > 1 and id(node) not in self.split and key not in self.split:
                parts.append(self._lexeme(Seq(node.items[at:end]), key))
                at = end
                continue
            parts += [self._above(item) for item in node.items[at : max(end, at + 1)]]
            at = max(end, at + 1)
        return tuple(parts)

    def _alternatives(self, node: Alt) -> tuple[Above, ...]:
        """Join regular alternatives into one lexeme."""
        key = (id(node), "alternatives")
        joined = [item for item in node.items if self._is_regular(item) and id(item) not in self.split]
        if len(joined) < 2 or key in self.split or id(node) in self.split:
            return tuple(self._above(item) for item in node.items)
        taken = {id(item) for item in joined}
        others = [self._above(item) for item in node.items if id(item) not in taken]
        return (self._lexeme(Alt(tuple(joined)), key), *others)

    def _lexeme(self, node: Node, key: object) -> Lexeme:
        """Return the lexeme of a part; a part used in several places is one lexeme."""
        lexeme = self._by_key.get(key)
        if lexeme is None:
            lexeme = self._by_key[key] = Lexeme(node, len(self.lexemes), key)
            self.lexemes.append(lexeme)
        return lexeme


class _Analysis:
    """Finds lexemes whose longer match would swallow what follows them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._masks: list[int] = []
        self._next: list[set[int]] = []
        self._owner: list[int] = []
        self._starts: list[set[int]] = []
        self._lasts: set[int] = set()
        self._edges = self._find_edges()
        self._too_large = False
        for lexeme in plan.lexemes:
            first, last, _ = self._positions(lexeme.node, lexeme.index)
            self._starts.append(first)
            self._lasts |= last
        self._first = dict.fromkeys(plan.productions, 0)
        self._empty = dict.fromkeys(plan.productions, False)
        self._after_rule = dict.fromkeys(plan.productions, 0)
        self._after = [0] * len(plan.lexemes)
        self._after_leaves: set[int] = set()
        self._json_mask = self._mask(_JSON_STARTS)

    def unsafe(self) -> list[Lexeme]:
        """Return the lexemes to split; none if all are safe or the analysis has too many states."""
        if self._too_large:
            return []
        self._find_followers()
        # A place is a set of lexemes possible together: at the start, and after each set of matches.
        places = [self._first_of(self._plan.productions[self._plan.root])[0], *self._after_leaves]
        seen = set(places)
        found: dict[int, Lexeme] = {}
        n_states = 0
        while places:
            expected = places.pop()
            starts = frozenset().union(*(self._starts[i] for i in _bits(expected) if i < len(self._starts)))
            begin: tuple[frozenset[int], frozenset[int]] = (starts, frozenset())
            states, waiting = {begin}, [begin]
            while waiting:
                out, matched = waiting.pop()
                n_states += 1
                if n_states > _MAX_STATES:
                    return list(found.values())
                if matched:
                    self._check(matched, out, found)
                    after = 0
                    for i in matched:
                        after |= self._after[i]
                    if after not in seen:
                        seen.add(after)
                        places.append(after)
                for step in self._steps(out):
                    if step not in states:
                        states.add(step)
                        waiting.append(step)
        return list(found.values())

    def _check(self, matched: frozenset[int], out: frozenset[int], found: dict[int, Lexeme]) -> None:
        for i in matched:
            follow = 0
            for j in _bits(self._after[i]):
                follow |= self._json_mask if j >= len(self._starts) else self._mask_of(self._starts[j])
            for position in out:
                other = self._owner[position]
                if self._masks[position] & follow:
                    for index in (other, i):
                        lexeme = self._plan.lexemes[index]
                        if _can_split(lexeme.node):
                            found[index] = lexeme
                            break

    def _steps(self, out: frozenset[int]) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Return the positions possible after each class of characters, and the lexemes that it completes."""
        blocks: list[int] = []
        covered = 0
        for mask in {self._masks[p] for p in out}:
            cut = [part for block in blocks for part in (block & mask, block & ~mask) if part]
            blocks = [*cut, mask & ~covered] if mask & ~covered else cut
            covered |= mask
        steps = []
        for block in blocks:
            read = [p for p in out if self._masks[p] & block]
            ends = frozenset(self._owner[p] for p in read if p in self._lasts)
            steps.append((frozenset().union(*(self._next[p] for p in read)), ends))
        return steps

    def _mask_of(self, positions: set[int]) -> int:
        return _union([self._masks[position] for position in positions])

    def _find_edges(self) -> list[int]:
        """Return the code points at which a character set begins or has just ended; between two, all are alike."""
        edges = {0}
        names: set[str] = set()
        stack: list[Node] = [lexeme.node for lexeme in self._plan.lexemes] + [_JSON_STARTS]
        while stack:
            node = stack.pop()
            stack.extend(children(node))
            if isinstance(node, RuleRef) and node.name not in names:
                names.add(node.name)
                stack.append(self._plan.rules[node.name])
            if isinstance(node, Chars):
                for low, high in node.ranges:
                    edges |= {low, high + 1}
            elif isinstance(node, Lit | UntilNode):
                for c in node.text if isinstance(node, Lit) else "".join(p for p in node.end if isinstance(p, str)):
                    edges |= {ord(c), ord(c) + 1}
        return sorted(edges)

    def _mask(self, chars: Chars) -> int:
        mask = 0
        for low, high in chars.ranges:
            a, b = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
            mask |= (1 << b) - (1 << a)
        return mask

    def _positions(self, node: Node, owner: int) -> tuple[set[int], set[int], bool]:
        """Build Glushkov's automaton: first and last positions, and whether the empty text matches."""
        if len(self._masks) > _MAX_POSITIONS:
            self._too_large = True
            return set(), set(), True
        if isinstance(node, RuleRef):
            return self._positions(self._plan.rules[node.name], owner)
        if isinstance(node, Lit):
            return self._chain([Chars(((ord(c), ord(c)),)) for c in node.text], owner)
        if isinstance(node, Chars):
            self._masks.append(self._mask(node))
            self._next.append(set())
            self._owner.append(owner)
            one = {len(self._masks) - 1}
            return one, one, False
        if isinstance(node, UntilNode):
            texts = (Lit(p) if isinstance(p, str) else RepeatNode(_ANY, 0, None) for p in node.end)
            return self._chain([RepeatNode(_ANY, 0, None), *texts], owner)
        if isinstance(node, Alt):
            parts = [self._positions(item, owner) for item in node.items]
            first, last = set().union(*(p[0] for p in parts)), set().union(*(p[1] for p in parts))
            return first, last, any(p[2] for p in parts)
        if isinstance(node, RepeatNode):
            return self._repeated(node, owner)
        return self._chain(list(children(node)), owner)

    def _chain(self, items: list[Node], owner: int) -> tuple[set[int], set[int], bool]:
        first: set[int] = set()
        last: set[int] = set()
        empty = True
        for item in items:
            firsts, lasts, nothing = self._positions(item, owner)
            for p in last:
                self._next[p] |= firsts
            first |= firsts if empty else set()
            last = (last | lasts) if nothing else lasts
            empty = empty and nothing
        return first, last, empty

    def _repeated(self, node: RepeatNode, owner: int) -> tuple[set[int], set[int], bool]:
        """Write small counts out; treat longer ones as endless, which can only add conflicts."""
        if node.high == 0:
            return set(), set(), True
        if node.high is not None and node.high <= _LONGEST_COUNTED:
            optional = [Alt((node.item, Seq(())))] * (node.high - node.low)
            return self._chain([*[node.item] * node.low, *optional], owner)
        first, last, empty = self._positions(node.item, owner)
        for p in last:
            self._next[p] |= first
        return first, last, empty or node.low == 0

    def _first_of(self, part: Above) -> tuple[int, bool]:
        """Return the lexemes (bits) that may come first, and whether the part may be empty."""
        if isinstance(part, Lexeme):
            return 1 << part.index, self._plan.nullable(part.node)
        if part.kind == "rule":
            return self._first[part.name], self._empty[part.name]
        if part.kind == "leaf":
            return (1 << len(self._plan.lexemes) if isinstance(part.node, Json) else 0), False
        if part.kind == "alt":
            found = [self._first_of(item) for item in part.items]
            return _union([first for first, _ in found]), any(empty for _, empty in found)
        if part.kind == "repeat":
            first, empty = self._first_of(part.items[0])
            assert isinstance(part.node, RepeatNode)
            return (first if part.node.high != 0 else 0), empty or part.node.low == 0
        first, empty = 0, True
        for item in part.items:
            more, nothing = self._first_of(item)
            first |= more if empty else 0
            empty = empty and nothing
        return first, empty

    def _find_followers(self) -> None:
        """Compute the fixed points of what may come first and what may follow."""
        changed = True
        while changed:
            changed = False
            for name, production in self._plan.productions.items():
                new = self._first_of(production)
                if new != (self._first[name], self._empty[name]):
                    self._first[name], self._empty[name] = new
                    changed = True
        changed = True
        while changed:
            before = (list(self._after), dict(self._after_rule))
            for name, production in self._plan.productions.items():
                self._follow(production, self._after_rule[name])
            changed = before != (self._after, self._after_rule)

    def _follow(self, part: Above, after: int) -> None:
        if isinstance(part, Lexeme):
            self._after[part.index] |= after
        elif part.kind == "rule":
            self._after_rule[part.name] |= after
        elif part.kind == "alt":
            for item in part.items:
                self._follow(item, after)
        elif part.kind == "repeat":
            assert isinstance(part.node, RepeatNode)
            again = self._first_of(part.items[0])[0] if part.node.high != 1 else 0
            self._follow(part.items[0], after | again)
        elif part.kind == "leaf":
            self._after_leaves.add(after)
        else:
            for item in reversed(part.items):
                self._follow(item, after)
                first, empty = self._first_of(item)
                after = first | (after if empty else 0)


def _union(masks: list[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _can_split(node: Node) -> bool:
    if isinstance(node, Lit):
        return len(node.text) > 1
    return not isinstance(node, Chars | UntilNode | Whole)
