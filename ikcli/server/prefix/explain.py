"""Say where the beginning of a prompt came from, why no more of it was reused, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ikcli.engine.run.adapters import Added
from ikcli.server.prefix.keys import Tokens
from ikcli.server.prefix.reused import Miss, Reused
from ikcli.server.prefix.store import Match
from ikcli.server.prefix.tree import Node, Tree

TextOf = Callable[[Sequence[int]], str]
_SHOWN = 48  # characters of a node's text


def find_miss(prompt: Tokens, most: int, match: Match, held: Iterable[tuple[Tokens, int]]) -> Miss | None:
    """Return why no more than a part of a prompt was known, None if nothing known goes on differently.

    `most`: tokens that could be reused. `held`: texts of slots and the number of tokens that each shares.
    """
    found = Miss(match.n_same, "no checkpoint") if match.n < match.n_same else None
    best = match.n_same
    if best < most and (known := _next(match)) is not None:
        found = Miss(best, "differs", int(prompt[best]), known)
    for tokens, n in held:
        if n > best or (n == best and found is None):
            best = n
            differs = n < min(most, len(tokens))
            found = Miss(n, "differs", int(prompt[n]), int(tokens[n])) if differs else None
    return found if found is not None and found.at else None


def _next(match: Match) -> int | None:
    """Return a token with which a stored text goes on where the matching ends."""
    if not match.path:
        return None
    last = match.path[-1]
    if last.end > match.n_same:
        return int(last.tokens[match.n_same - last.start])
    return next(reversed(last.children), None)


def describe(reused: Reused, text_of: TextOf) -> dict[str, object]:
    """Return the fields of a log line."""
    fields: dict[str, object] = {"n_slot": reused.n_slot, "n_ram": reused.n_ram, "n_disk": reused.n_disk}
    miss = reused.miss
    if miss is not None:
        fields |= {"missed_at": miss.at, "missed_because": miss.reason}
        if miss.reason == "differs":
            fields |= {
                "token": miss.wanted, "text": shown(text_of, [miss.wanted]),
                "cached_token": miss.known, "cached_text": shown(text_of, [miss.known]),
            }  # fmt: skip
    return fields


def shown(text_of: TextOf, tokens: Sequence[int]) -> str:
    """Return the text of tokens for one line; keys below 0 are positions of images."""
    words = [t for t in tokens if t >= 0]
    text = text_of(words) if words else ""
    return text + "[image]" * (len(words) < len(tokens))


def excerpt(text_of: TextOf, tokens: Tokens) -> str:
    """Return the beginning of a text for one line, in quotes."""
    text = repr(shown(text_of, tokens[:_SHOWN].tolist()))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def tree_lines(tree: Tree, text_of: TextOf) -> Iterator[str]:
    """Yield the stored texts as a tree, one line per branch, with what each of them takes."""
    mib = tree.n_bytes / (1 << 20)
    yield f"prompt cache: {tree.n_texts} texts in {tree.n_nodes} nodes, {mib:.1f} MiB"
    for added, root in list(tree.roots.items()):
        if root.children and len(tree.roots) > 1:
            yield _added_line(added)
        for i, child in enumerate(children := list(root.children.values()), 1):
            yield from _branch(child, "", i == len(children), text_of)


def _added_line(added: Added) -> str:
    return f"adapters {list(added.scales)}, control vectors {len(added.vectors)}"


def _branch(node: Node, indent: str, last: bool, text_of: TextOf) -> Iterator[str]:
    """Yield the lines of a branch: nodes that follow each other without a fork are one line."""
    run = [node]
    while len(run[-1].children) == 1:
        run.extend(run[-1].children.values())
    n_bytes, checkpoints = sum(one.n_bytes for one in run), [c.n_tokens for one in run for c in one.checkpoints]
    n_disk = sum(len(one.tokens) for one in run if one.rows is None)
    more = f", {n_disk} tokens on disk only" if n_disk else ""
    more += f", checkpoints at {', '.join(map(str, checkpoints))}" if checkpoints else ""
    uses = max(one.uses for one in run)
    yield (
        f"{indent}{'└' if last else '├'}─ {node.start}..{run[-1].end - 1}  {n_bytes / (1 << 20):.1f} MiB, "
        f"used {uses} times{more}  {excerpt(text_of, run[0].tokens)}"
    )
    below = list(run[-1].children.values())
    for i, child in enumerate(below, 1):
        yield from _branch(child, indent + ("   " if last else "│  "), i == len(below), text_of)
