"""Check and simplify rules: find what is undefined, endless or too deep, and which rules are regular.

A rule is regular if a regular expression can replace it: nothing that it refers to is recursive. Recursion at one end
only (`ws ::= ([ \\t] ws)?`) becomes a repetition first.
"""

from __future__ import annotations

from collections.abc import Iterator

from ikcli.grammar.nodes import (
    EMPTY,
    GrammarError,
    Json,
    Node,
    RepeatNode,
    RuleRef,
    Rules,
    Seq,
    Token,
    alt,
    children,
    seq,
)

MAX_NODES = 200_000
MAX_DEPTH = 150


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and everything in it."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(children(top))


def check_rules(rules: Rules, root: str) -> None:
    """Raise GrammarError if a rule is missing, the grammar is too large, or `root` can never end."""
    if root not in rules:
        known = ", ".join(list(rules)[:5])
        raise GrammarError(f"grammar: rule {root} is missing" + (f" (it has {known})" if known else ""))
    n_nodes = 0
    for name, body in rules.items():
        for node in walk(body):
            n_nodes += 1
            if isinstance(node, RuleRef) and node.name not in rules:
                raise GrammarError(f"grammar: rule {name} refers to {node.name}, which is not defined")
    if n_nodes > MAX_NODES:
        raise GrammarError(f"grammar: it has {n_nodes} parts; at most {MAX_NODES} are accepted")


def without_dead_ends(rules: Rules, root: str) -> Rules:
    """Drop the alternatives that no text can complete; raise GrammarError if nothing is left."""
    productive = _productive(rules)
    if root not in productive:
        raise GrammarError(f"grammar: rule {root} refers to itself on every path, so no text could ever be complete")

    def pruned(node: Node) -> Node | None:
        if isinstance(node, RuleRef):
            return node if node.name in productive else None
        if isinstance(node, RepeatNode):
            item = pruned(node.item)
            if item is None:
                return EMPTY if node.low == 0 else None
            return node if item is node.item else RepeatNode(item, node.low, node.high)
        if not children(node):
            return node
        items = [pruned(child) for child in children(node)]
        kept = [item for item in items if item is not None]
        if len(kept) < len(items) and (isinstance(node, Seq) or not kept):
            return None
        if all(a is b for a, b in zip(kept, children(node), strict=False)) and len(kept) == len(items):
            return node
        return seq(*kept) if isinstance(node, Seq) else alt(*kept)

    found = {name: pruned(rules[name]) for name in productive}
    return {name: body for name, body in found.items() if body is not None}


def simplify(rules: Rules, root: str) -> tuple[Rules, frozenset[str]]:
    """Keep the rules that `root` needs, turn one-sided recursion into repetition, and name the regular ones."""
    components = _components(rules, root)
    done: Rules = {}
    regular: set[str] = set()
    depth: dict[str, int] = {}
    for component in components:
        for name in component:
            done[name] = rules[name]
        if len(component) == 1:
            name = component[0]
            done[name] = _without_recursion(name, rules[name])
            nodes = list(walk(done[name]))
            if all(
                not isinstance(n, Token | Json) and (not isinstance(n, RuleRef) or n.name in regular) for n in nodes
            ):
                regular.add(name)
        for name in component:
            depth[name] = _depth(done[name], depth)
            if depth[name] > MAX_DEPTH:
                raise GrammarError(f"grammar: rules and brackets are nested more than {MAX_DEPTH} deep")
    return done, frozenset(regular)


def _depth(body: Node, depth: dict[str, int]) -> int:
    """Return the depth of a body together with the rules below it whose depth is known."""
    deepest = 0
    stack = [(body, 1)]
    while stack:
        node, level = stack.pop()
        deepest = max(deepest, level + (depth.get(node.name, 0) if isinstance(node, RuleRef) else 0))
        stack.extend((child, level + 1) for child in children(node))
    return deepest


def _productive(rules: Rules) -> set[str]:
    found: set[str] = set()

    def ends(node: Node) -> bool:
        if isinstance(node, RuleRef):
            return node.name in found
        if isinstance(node, RepeatNode):
            return node.low == 0 or ends(node.item)
        parts = [ends(child) for child in children(node)]
        return all(parts) if not parts or isinstance(node, Seq) else any(parts)

    used_by: dict[str, list[str]] = {}
    for name, body in rules.items():
        for node in walk(body):
            if isinstance(node, RuleRef):
                used_by.setdefault(node.name, []).append(name)
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in found and ends(rules[name]):
            found.add(name)
            waiting.extend(used_by.get(name, ()))
    return found


def _components(rules: Rules, root: str) -> list[list[str]]:
    """Return the strongly connected rules reachable from `root`, dependencies first (iterative Tarjan)."""
    refs = {name: [n.name for n in walk(body) if isinstance(n, RuleRef)] for name, body in rules.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    found: list[list[str]] = []
    work = [(root, iter(refs[root]))]
    order[root] = low[root] = 0
    path.append(root)
    on_path.add(root)
    while work:
        name, rest = work[-1]
        child = next(rest, None)
        if child is None:
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[name])
            if low[name] == order[name]:
                component: list[str] = []
                while not component or component[-1] != name:
                    component.append(path.pop())
                on_path.difference_update(component)
                found.append(component)
        elif child not in order:
            order[child] = low[child] = len(order)
            path.append(child)
            on_path.add(child)
            work.append((child, iter(refs[child])))
        elif child in on_path:
            low[name] = min(low[name], order[child])
    return found


def _refers(node: Node, name: str) -> bool:
    return any(isinstance(n, RuleRef) and n.name == name for n in walk(node))


def _without_recursion(name: str, body: Node) -> Node:
    """Rewrite `x ::= a x | b` as `a* b` and `x ::= x a | b` as `b a*`; other recursion stays."""
    if not _refers(body, name):
        return body
    for at_end in (True, False):
        parts = _split(name, body, at_end)
        if parts is not None and parts[1]:
            loops, ends = [loop for loop in parts[0] if loop is not EMPTY], parts[1]
            if not loops:
                return alt(*ends)
            loop = RepeatNode(alt(*loops), 0, None)
            return Seq((loop, alt(*ends)) if at_end else (alt(*ends), loop))
    return body


def _split(name: str, node: Node, at_end: bool) -> tuple[list[Node], list[Node]] | None:
    """Split alternatives: what precedes (follows) `name` where it ends (starts) one, and the others."""
    if isinstance(node, RuleRef) and node.name == name:
        return [], []
    if not _refers(node, name):
        return [], [node]
    if isinstance(node, RepeatNode):
        if (node.low, node.high) != (0, 1):
            return None
        inner = _split_ref(name, node.item, at_end)
        return None if inner is None else (inner[0], [*inner[1], EMPTY])
    if isinstance(node, Seq):
        rest, edge = (node.items[:-1], node.items[-1]) if at_end else (node.items[1:], node.items[0])
        if any(_refers(item, name) for item in rest):
            return None
        inner = _split_ref(name, edge, at_end)
        if inner is None:
            return None
        loops, ends = ([_join(rest, part, at_end) for part in group] for group in inner)
        return loops, ends
    loops, ends = [], []
    for item in children(node):
        inner = _split_ref(name, item, at_end)
        if inner is None:
            return None
        loops += inner[0]
        ends += inner[1]
    return loops, ends


def _split_ref(name: str, node: Node, at_end: bool) -> tuple[list[Node], list[Node]] | None:
    if isinstance(node, RuleRef) and node.name == name:
        return [EMPTY], []
    return _split(name, node, at_end)


def _join(rest: tuple[Node, ...], part: Node, at_end: bool) -> Node:
    if part is EMPTY:
        return seq(*rest)
    return seq(*rest, part) if at_end else seq(part, *rest)
