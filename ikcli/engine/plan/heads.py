"""Graphs and programs of the heads that predict further tokens (`models/heads/mtp.py`), for sessions that run them."""

from __future__ import annotations

from ikcli.engine.run.model import Model
from ikcli.graph import Graph, Node
from ikcli.models import GraphConfig, Weights
from ikcli.models.heads import mtp
from ikcli.models.heads.external import BlockModule
from ikcli.models.heads.head import MARKOV as MARKOV_TENSOR

HEAD, FEW = "mtp-", "-few"  # programs of heads: for prompts, and with this suffix for a few rows
BLOCK = f"{HEAD}block"  # of a head that drafts blocks: their rows
MARKOV = f"{HEAD}markov"  # ... and what a token adds to the logits of the next one
KEPT_STATES = 64  # of a sequence, besides those of a micro-batch: for drafts that are rejected, and rows that wait


def build_model(model: Model, graph: Graph, weights: Weights, cfg: GraphConfig) -> Node:
    """Record the model, and the states that the graph is to have."""

    def build() -> Node:
        return model.module.build(graph, model.hp, weights, cfg)

    if graph.wants_states is None or model.external is None:
        return build()
    return model.external.record(graph, model.hp, weights, build)


def record_heads(model: Model, weights: Weights, cfg: GraphConfig) -> dict[str, tuple[Graph, Node]]:
    """Record the heads; drafts are only guesses, so a graph serves prompts and generation."""
    found: dict[str, tuple[Graph, Node]] = {}
    if cfg.n_heads and model.external is not None:
        head = model.external
        builds = {f"{HEAD}0": head.module.build}
        if isinstance(head.module, BlockModule):
            builds[BLOCK] = head.module.build_block
            if head.prefix + MARKOV_TENSOR in weights:
                builds[MARKOV] = head.module.build_markov
        for name, build in builds.items():
            graph = model.graph(weights)
            graph.exact = model.is_exact
            found[name] = graph, build(graph, head.head, model.hp, weights, cfg, head.prefix)
        return found
    for i in range(cfg.n_heads):
        graph = model.graph(weights)
        graph.exact = model.is_exact
        assert model.further is not None and isinstance(model.module, mtp.HasLayers)
        found[f"{HEAD}{i}"] = graph, mtp.build(graph, model.module, model.further, weights, cfg, i)
    return found


def kept_states(n_ubatch: int) -> int:
    """Return the positions of a sequence whose states a session keeps for its heads."""
    return n_ubatch + KEPT_STATES
