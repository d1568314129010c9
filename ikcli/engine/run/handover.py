"""The places of values in hand-over memory, through which devices pass them to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ikcli.engine.run.run_device import RunDevice
from ikcli.graph import Lifetime, Node, Rows, assign_offsets
from ikcli.graph.split import GraphSplit

_SLACK = 512  # bytes after every value that kernels may read


def handover_places(
    splits: Sequence[GraphSplit], rows: Mapping[Rows, int], results: Sequence[Node], parts: Mapping[str, RunDevice]
) -> tuple[dict[Node, tuple[int, int]], int]:
    """Return (first byte, bytes) of every value that crosses devices, and the size of the memory.

    A copy to a GPU may be in flight until the host has waited for that split of the GPU or a later one.
    """
    end = len(splits)
    waited = [
        end if parts[t.device].asynchronous else i for i, t in enumerate(splits)
    ]  # the split before which a copy is complete
    for device in {t.device for t in splits if parts[t.device].asynchronous}:
        own = [i for i, t in enumerate(splits) if t.device == device]
        for j in range(end - 1, -1, -1):
            known = max((i for i in splits[j].after if splits[i].device == device), default=-1)
            for i in own:
                if i <= known:
                    waited[i] = j
    first = {n: i for i, t in enumerate(splits) for n in t.exports}
    last = dict(first)
    for i, t in enumerate(splits):
        for node in t.imports:
            last[node] = max(last[node], waited[i])
        for x in (x for node in t.nodes for x in node.nodes()):
            if x in first and parts[t.device].in_place:
                last[x] = max(last[x], i)
    last |= dict.fromkeys(results, end)
    nodes = list(first)
    lives = [Lifetime(rows[n.rows.symbol] * n.rows.factor * n.cols * 4 + _SLACK, first[n], last[n]) for n in nodes]
    offsets, n_bytes = assign_offsets(lives)
    return {n: (at, life.n_bytes) for n, at, life in zip(nodes, offsets, lives, strict=True)}, n_bytes
