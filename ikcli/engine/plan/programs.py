"""Name the graphs of a session and the programs made of them, from settings alone. Sessions run them, plans size them.

There is one graph for generation and, where the two differ (MLA), one or two for prompts. Every graph becomes a
program. The generation graph also becomes a second, batch-invariant program for a few tokens of several sequences. For
embeddings, graphs end at the last norm, before the output matrix, and their programs can return a row for every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ikcli.backends.cpu.program import BATCH_INVARIANT_ROWS
from ikcli.engine.plan.graph_rules import check_media
from ikcli.engine.plan.heads import FEW, HEAD, build_model, kept_states, record_heads
from ikcli.engine.plan.sizes import window_cells
from ikcli.engine.run.model import Model
from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node, Rows
from ikcli.models import EXPAND_MIN_TOKENS, GraphConfig, HasEncoder, Outputs, Weights
from ikcli.models.sparse.indexer import top_k
from ikcli.quant.formats import format_by_name
from ikcli.settings.run import RunConfig

Graphs = Mapping[str, tuple[Graph, Node]]
"""Graph and result by kind: decode, perhaps prefill, `SHORT` and `ENCODE`, and these with the suffix `EMBEDS`; with
heads, also step and `HEAD` with the number of each.
"""

EMBEDS = "-embd"
ENCODE = "encode"  # the encoder of an encoder-decoder, whose decoder is what other programs compute
SHORT = "short"  # prompts of models with an indexer, as long as queries see no more than it may choose
HIDDEN = "result_norm"  # the node whose rows are embeddings


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One program: the kind of its graph, its most tokens and outputs.

    `offload`: it has variants that copy weights in RAM to GPUs.
    """

    kind: str
    n_tokens: int
    n_outputs: int
    batch_invariant: bool = False
    offload: bool = True


def graph_config(
    config: RunConfig,
    n_cells: int,
    n_seq: int = 1,
    window: int = 0,
    outputs: Outputs = Outputs.LOGITS,
    n_heads: int = 0,
) -> GraphConfig:
    """Return the settings that the graphs of a model depend on.

    A micro-batch has no more tokens than the cache has cells. `window`: positions that the window layers of the model
    see.
    """
    n_ubatch = min(config.n_ubatch, n_cells)
    return GraphConfig(
        mla=config.mla,
        flash_attn=config.flash_attn,
        amb=config.amb,
        fmoe=config.fmoe,
        ser=config.ser,
        type_k=format_by_name(config.type_k).type,
        type_v=format_by_name(config.type_v).type,
        index_top_k=config.dsa_top_k if config.dsa else 0,
        type_index=format_by_name(config.type_index).type,
        k_hadamard=_rotates_k(config),
        v_hadamard=config.v_hadamard,
        n_ctx=n_cells,
        n_seq=n_seq,
        n_ubatch=n_ubatch,
        n_window=0 if config.swa_full else window_cells(window, n_ubatch, n_cells // n_seq),
        outputs=outputs,
        n_heads=n_heads,
    )


def _rotates_k(config: RunConfig) -> bool:
    """Return whether K is rotated (-khad).

    By default it is where a block of keys has few levels, all of which the outliers of some columns would take.
    """
    if config.k_hadamard is not None:
        return config.k_hadamard
    return format_by_name(config.type_k).bpw < 8


def record_graphs(model: Model, weights: Weights, cfg: GraphConfig) -> Graphs:
    """Record the generation graph, and a prompt graph where the two differ."""
    hp = model.hp
    if cfg.outputs.logits and not hp.causal:
        raise hp.no_next_token()

    def record(kind: str, states: Rows | None) -> tuple[Graph, Node]:
        graph = model.graph(weights)
        graph.exact, graph.wants_states = model.is_exact, states
        graph.n_deep = -1 if cfg.media is None else cfg.media.n_deep
        return graph, build_model(model, graph, weights, kinds[kind])

    kinds = {"decode": replace(cfg, expand=False)}
    if cfg.n_heads:  # a graph of its own, because prompts need the states of tokens that have no logits
        kinds["step"] = kinds["decode"]
    if hp.kv_lora_rank and cfg.mla >= 2 and cfg.flash_attn and cfg.n_ubatch >= EXPAND_MIN_TOKENS:
        kinds["prefill"] = replace(cfg, expand=True)
        if top_k(hp, cfg):
            kinds[SHORT] = replace(cfg, expand=True, index_keys_only=True)
    whole: dict[str, tuple[Graph, Node]] = {}
    graphs: dict[str, tuple[Graph, Node]] = {}
    if cfg.media is not None:
        check_media(cfg.media, hp)
    for kind in kinds:
        states = (Rows.OUTPUTS if kind == "step" else Rows.TOKENS) if cfg.n_heads else None
        whole[kind] = record(kind, states)
        if cfg.outputs.logits:
            graphs[kind] = whole[kind]
        if not cfg.outputs.embeddings or kind in ("step", SHORT) or hp.n_layer_dec:
            continue
        graph, last = record(kind, None) if cfg.n_heads else whole[kind]
        hidden = next((n for n in reversed(graph.nodes) if n.name == HIDDEN), None) if hp.causal else last
        if hidden is not None:
            graphs[kind + EMBEDS] = graph.until(hidden), hidden
    if hp.n_layer_dec and cfg.outputs.logits:
        graph = model.graph(weights)
        assert isinstance(model.module, HasEncoder)
        graphs[ENCODE] = whole[ENCODE] = graph, model.module.build_encoder(graph, hp, weights, cfg)
    model.adapters.check_used(graph for graph, _ in whole.values())
    if not graphs:
        raise UnsupportedError(f"{model.source}: embeddings of {hp.arch} models are not supported")
    return graphs | record_heads(model, weights, replace(cfg, media=None))


def step_tokens(n_step: int) -> int:
    """Return the tokens of the generation program if up to `n_step` of them come at once (0: one)."""
    return max(n_step, BATCH_INVARIANT_ROWS) if n_step else 1


def runs(graphs: Graphs, n_ubatch: int, n_outputs: int, n_step: int) -> dict[str, ProgramSpec]:
    """Return the programs by name; the generation program takes `n_step` tokens.

    Embeddings beside logits have no variants: each takes seconds to plan for large models.
    """
    found = {}
    for kind in graphs:
        if kind == "step":
            continue
        if kind.startswith(HEAD):
            few = min(n_step, n_ubatch)
            found[kind] = ProgramSpec(kind, n_ubatch, min(n_outputs, n_ubatch), offload=False)
            found[kind + FEW] = ProgramSpec(kind, few, few, batch_invariant=True)
            continue
        few = kind.replace("decode", "prefill") in graphs and kind.startswith("decode")
        n_tokens = min(n_ubatch, EXPAND_MIN_TOKENS - 1) if few else n_ubatch
        if kind.endswith(EMBEDS):
            found[kind] = ProgramSpec(kind, n_tokens, n_tokens, offload="decode" not in graphs)
        else:
            found[kind] = ProgramSpec(kind, n_tokens, min(n_outputs, n_tokens))
    if "decode" in graphs:
        found["step"] = ProgramSpec("step" if "step" in graphs else "decode", n_step, n_step, batch_invariant=True)
    return found


def output_bytes(cfg: GraphConfig, model: Model, n_outputs: int) -> int:
    """Return the bytes kept for the caller: logits of so many tokens, embeddings of a micro-batch, states for heads."""
    n = n_outputs * model.hp.n_vocab if cfg.outputs.logits else 0
    if cfg.n_heads:
        n += cfg.n_seq * kept_states(cfg.n_ubatch) * model.n_state
    return 4 * (n + cfg.n_ubatch * model.hp.n_embd if cfg.outputs.embeddings else n)
