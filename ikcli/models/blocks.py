"""Blocks shared by the architectures: the layer loop, attention with a K and a V cache, dense and expert FFN.

Node names are those of the reference graphs (`attn_norm-0`, `ffn_moe_logits-3`, `l_out-3`, `result_output`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ikcli.graph import Graph, HeadSlice, Node, Per, Rows, Weight
from ikcli.models import alibi
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.rope import RopeParams, inverse_frequencies, magnitude
from ikcli.models.tensors import LayerWeights, Weights

Block = Callable[[Node, LayerWeights], Node]
UNNORMED_STATES = ("step35",)
"""Heads that predict further tokens read states before the last norm; those of other architectures, after it."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of an architecture: attention, feed-forward part, and the name of the norm before the latter."""

    attn: Block
    ffn: Block
    ffn_norm: str = "ffn_norm"


def transformer(
    g: Graph,
    hp: HParams,
    w: Weights,
    attn: Block,
    ffn: Block,
    ffn_norm: str = "ffn_norm",
    *,
    norm_embeddings: bool = False,
) -> Node:
    """Record pre-norm residual layers and the output head; `ffn_norm` names the norm of the feed-forward part.

    `norm_embeddings`: norm the embeddings, without weights. After the last attention only the rows whose logits were
    requested go on.
    """
    x = embedded(g, hp, w)
    if norm_embeddings:
        x = g.norm(x, None, hp.eps, "inp_normed", kind="rms")
    for il in _layers(g, hp):
        if hp.norms_loops and g.loop and not il:
            x = norm(g, hp, x, w["output_norm.weight"], "loop_norm")
        layer = w.layer(il)
        cur = attn(normed(g, hp, x, layer, "attn_norm"), layer)
        if (il, g.loop) == (hp.n_layer - 1, hp.n_loop - 1):
            if g.wants_states is Rows.TOKENS:  # beside the output rows, which are computed as without them
                exact = g.exact
                g.states = states_of(g, hp, w, second_half(g, hp, cur, x, layer, ffn, ffn_norm))
                g.il, g.exact = il, exact
            cur = g.select_outputs(cur, "last_attn")
            x = g.select_outputs(x, "last_ffn_inp")
        x = second_half(g, hp, cur, x, layer, ffn, ffn_norm)
    g.il = -1
    return output(g, hp, w, x)


def _layers(g: Graph, hp: HParams) -> Iterator[int]:
    """Yield the number of every layer when it is to be recorded, as often as the layers run."""
    for g.loop in range(hp.n_loop):
        for g.il in range(hp.n_layer):
            yield g.il
    g.loop = 0


def second_half(g: Graph, hp: HParams, cur: Node, x: Node, layer: LayerWeights, ffn: Block, ffn_norm: str) -> Node:
    """Record the rest of a layer after its attention `cur`; x is the residual."""
    x = g.add(g.scale(cur, hp.residual_scale, "attn_scaled"), x, "ffn_inp")
    cur = ffn(normed(g, hp, x, layer, ffn_norm, "ffn_norm"), layer)
    return g.layer_out(g.add(g.scale(cur, hp.residual_scale, "ffn_scaled"), x, "l_out"))


def states_of(g: Graph, hp: HParams, w: Weights, x: Node) -> Node:
    """Return the states that heads read, of the rows x of the last layer's output."""
    g.il = -1
    if hp.arch in UNNORMED_STATES:
        return x
    return norm(g, hp, x, w["output_norm.weight"], "states_norm", w.get("output_norm.bias"))


def one_part_layers(g: Graph, hp: HParams, w: Weights, part: Block) -> Node:
    """Record layers of one norm and one part, a mixer or a feed-forward part, and the output head."""
    x = embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = part(normed(g, hp, x, layer, "attn_norm"), layer)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_mixer"), g.select_outputs(x, "last_inp")
        x = g.layer_out(g.add(cur, x, "l_out"))
    g.il = -1
    return output(g, hp, w, x)


def parallel_transformer(
    g: Graph,
    hp: HParams,
    w: Weights,
    attn: Block,
    ffn: Block,
    attn_norm: str = "attn_norm",
    ffn_norm: str = "attn_norm",
) -> Node:
    """Record layers in which attention and feed-forward part both read (norms of) the residual, and the output head."""
    x = embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        first = normed(g, hp, x, layer, attn_norm, "attn_norm")
        cur = attn(first, layer)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
            first = g.select_outputs(first, "last_normed") if ffn_norm == attn_norm else first
        second = first if ffn_norm == attn_norm else normed(g, hp, x, layer, ffn_norm, "ffn_norm")
        x = g.layer_out(g.add(g.add(ffn(second, layer), cur, "attn_ffn"), x, "l_out"))
    g.il = -1
    return output(g, hp, w, x)


def embedded(g: Graph, hp: HParams, w: Weights) -> Node:
    """Return the input of the first layer."""
    x = g.with_media(g.scale(g.embed(w["token_embd.weight"]), hp.embedding_scale, "inp_scaled"))
    if "token_embd_norm.weight" in w and "output_norm.weight" in w:
        x = norm(g, hp, x, w["token_embd_norm.weight"], "inp_norm", w.get("token_embd_norm.bias"))
    positions = w.get("position_embd.weight")
    return x if positions is None else g.add(x, g.embed(positions, "pos_embd", by_position=True), "inpL")


def normed(g: Graph, hp: HParams, x: Node, layer: LayerWeights, which: str, name: str = "") -> Node:
    """Apply a norm of the layer to x, or return x where the layer has none of that name."""
    w = layer.get(which)
    return x if w is None else norm(g, hp, x, w, name or which, layer.get(f"{which}_bias"))


def norm(g: Graph, hp: HParams, x: Node, w: Weight, name: str, bias: Weight | None = None) -> Node:
    """Apply the norm of the model's kind to whole rows."""
    return g.rms_norm(x, w, hp.eps, name) if hp.norm == "rms" else g.norm(x, w, hp.eps, name, b=bias)


def output(g: Graph, hp: HParams, w: Weights, x: Node) -> Node:
    """Apply the last norm (LFM2 and NeoBERT call it otherwise) and compute the logits, except of encoders."""
    names = ("output_norm.weight", "enc.output_norm.weight", "token_embd_norm.weight")
    last, weights = x, next((found for name in names if (found := w.get(name))), None) or w[names[0]]
    x = norm(g, hp, x, weights, "result_norm", w.get("output_norm.bias"))
    if not hp.causal:
        return x
    if g.wants_states is Rows.OUTPUTS:
        g.states = last if hp.arch in UNNORMED_STATES else x
    return logits(g, hp, w, x)


def logits(g: Graph, hp: HParams, w: Weights, x: Node) -> Node:
    """Return the logits of normed states."""
    head = w.get("output.weight") or w["token_embd.weight"]
    plain = hp.logit_scale == 1 and not hp.final_softcap
    x = linear(g, head, w.get("output.bias"), x, "result_output" if plain else "result_unscaled")
    x = g.scale(x, hp.logit_scale, "result_uncapped" if hp.final_softcap else "result_output")
    return g.softcap(x, hp.final_softcap, "result_output")


def rope_tables(
    g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None
) -> tuple[Node | None, ...]:
    """Return the RoPE table of every layer (None: no rotation); layers that rotate alike share one.

    `only`: the one layer whose table is recorded.
    """
    tables: dict[tuple[RopeParams, int], Node] = {}
    layers = [(own.rope, own.n_rot) for own in map(hp.at, range(hp.n_layer))]
    for rope, n_rot in layers if only is None else layers[only : only + 1]:
        if n_rot and (rope, n_rot) not in tables:
            factors = w.data(name) if rope.factors and (name := _factors(w, rope, cfg)) else None
            inv_freq = inverse_frequencies(rope, n_rot, factors)
            name = f"rope_table_{len(tables)}" if tables else "rope_table"
            freqs, size = inv_freq.tolist(), magnitude(rope, rope.attn_factor)
            if cfg.media is not None and (rope.sections or cfg.media.framed):
                tables[rope, n_rot] = g.axis_rope_table(freqs, rope.axes(len(freqs)), size, name)
            else:
                tables[rope, n_rot] = g.rope_table(freqs, size, name)
    return tuple(tables.get(key) for key in layers)


def _factors(w: Weights, rope: RopeParams, cfg: GraphConfig) -> str:
    """Return the name of the tensor with frequency factors; LongRoPE's choice depends on the context of a sequence."""
    names = ["rope_freqs"]
    names.append("rope_factors_long" if cfg.n_ctx // cfg.n_seq > rope.n_ctx_orig else "rope_factors_short")
    return next((f"{name}.weight" for name in names if f"{name}.weight" in w), "")


def linear(g: Graph, w: Weight, bias: Weight | None, x: Node, name: str) -> Node:
    """Multiply by a matrix and add an optional bias."""
    if bias is None:
        return g.mul_mat(w, x, name)
    return g.add(g.mul_mat(w, x, f"{name}_mm"), bias, name)


def self_attention(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    table: Node | None,
    *,
    neox: bool,
    norm_last: bool = False,
    norm_heads: bool = False,
    gating: str = "sigmoid",
    gated: bool = False,
    selected: Node | None = None,
) -> Node:
    """Record grouped-query attention with RoPE on q and k, optional biases and optional norms of q and k heads.

    Without `table` nothing is rotated. `norm_last`: q and k are normed after the rotation. `norm_heads`: norm heads
    after the rotation, without weights. `gated`: every query head of the projection is followed by as many columns of a
    gate on its result. See `attend` for the rest.
    """
    hp = hp.at(layer.il)
    fused = _query_and_gate(g, hp, x, layer) if gated else _fused_projections(g, hp, x, layer)
    q = _project(g, hp, x, layer, table, "q", hp.n_head, neox, norm_last, fused.get("q"))
    k = _project(g, hp, x, layer, table, "k", hp.n_head_kv, neox, norm_last, fused.get("k"))
    if norm_heads:
        q = g.norm(q, None, hp.eps, "Qcur_normed", kind="rms", width=hp.head_dim_k)
        k = g.norm(k, None, hp.eps, "Kcur_normed", kind="rms", width=hp.head_dim_k)
    if hp.temperature_scale:
        length = hp.temperature_length or hp.rope.n_ctx_orig
        q = g.pos_scale(q, hp.temperature_scale, length, "Qcur_tempered", shift=hp.temperature_shift)
    v = fused.get("v")
    if v is None:
        v = linear(g, attention_matrix(hp, layer, "v"), layer.get("attn_v_bias"), x, "Vcur")
        v = g.clamp(v, hp.clamp_kqv, "Vcur_clamped")
    v = g.scale(v, hp.value_scale, "Vcur_scaled")
    return attend(g, hp, cfg, q, (k, v), x, layer, gating=gating, gate=fused.get("gate"), selected=selected)


def attention_block(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, *, neox: bool, rotates: bool = True) -> Block:
    """Return `self_attention` for any layer, rotated where `hp` says so."""
    tables = rope_tables(g, hp, w, cfg) if rotates else (None,) * hp.n_layer
    return lambda x, layer: self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=neox)


def normed_after(g: Graph, block: Block, which: str, eps: float, name: str) -> Block:
    """Return a block followed by an RMS norm of the layer, with the weights `which`."""
    return lambda x, layer: g.rms_norm(block(x, layer), layer.with_ending_or_not(which), eps, name)


def attend(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    q: Node,
    kv: tuple[Node, Node] | None,
    x: Node,
    layer: LayerWeights,
    *,
    kv_layer: int = -1,
    gating: str = "sigmoid",
    gate: Node | None = None,
    selected: Node | None = None,
) -> Node:
    """Record `attended` and the output projection."""
    kqv = attended(g, hp, cfg, q, kv, x, layer, kv_layer=kv_layer, gating=gating, gate=gate, selected=selected)
    return linear(g, layer.attn_output, layer.get("attn_output_bias"), kqv, "kqv_out")


def attended(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    q: Node,
    kv: tuple[Node, Node] | None,
    x: Node,
    layer: LayerWeights,
    *,
    kv_layer: int = -1,
    gating: str = "sigmoid",
    gate: Node | None = None,
    selected: Node | None = None,
) -> Node:
    """Record attention of projected heads: what the output projection multiplies.

    Applies the layer's windows, sinks and gate on x (or `gate`). k and v are stored first; without `kv`, those that
    layer `kv_layer` stored are read. Encoders store nothing: their texts are whole. `selected`: the cells that an
    indexer chose for every KV head, or for all of them the positions of the entries that it chose.
    """
    if not hp.causal:
        assert kv is not None
        return attend_all(g, hp, q, *kv)
    if cfg.k_hadamard:
        q = g.hadamard(q, hp.n_head, hp.head_dim_k, "Qcur_hadamard")
    scale, width = hp.attention_scale or 1.0 / math.sqrt(hp.head_dim_k), hp.head_dim_k
    if hp.max_alibi_bias:
        q, width = alibi.queries(g, hp, cfg, q, scale), alibi.width(hp)
    per = Per.WINDOW if hp.window and cfg.n_window else Per.CELL
    k_cache = g.cache("k", hp.n_head_kv * width, cfg.type_k, per=per, il=kv_layer)
    v_cache = g.cache("v", hp.n_head_kv * hp.head_dim_v, cfg.type_v, per=per, il=kv_layer)
    if kv is not None:
        k, v = kv
        k = g.hadamard(k, hp.n_head_kv, hp.head_dim_k, "Kcur_hadamard") if cfg.k_hadamard else k
        v = g.hadamard(v, hp.n_head_kv, hp.head_dim_v, "Vcur_hadamard") if cfg.v_hadamard else v
        k = alibi.keys(g, hp, k) if hp.max_alibi_bias else k
        g.kv_store(k_cache, k, "k_cache_view")
        g.kv_store(v_cache, v, "v_cache_view")
    heads = [HeadSlice(q, 0, width, width)]
    keys, values = [HeadSlice(k_cache, 0, width, width)], HeadSlice(v_cache, 0, hp.head_dim_v, hp.head_dim_v)
    n_head, n_kv = hp.n_head, hp.n_head_kv
    if selected is not None:
        by_entry = not hp.index_block
        kqv = g.sparse_attention(
            heads, keys, values, selected, "kqv", n_head=n_head, n_head_kv=n_kv, scale=scale,
            lists=1 if by_entry else n_kv, block=hp.pool_ratio if by_entry else hp.index_block, rest=by_entry,
        )  # fmt: skip
    else:
        kqv = g.attention(
            heads,
            keys,
            values,
            "kqv",
            n_head=n_head,
            n_head_kv=n_kv,
            scale=scale,
            flash=cfg.flash_attn,
            heads_per_step=heads_per_step(cfg, n_head),
            window=hp.window,
            chunk=hp.chunk,
            sinks=layer.get("attn_sinks"),
            softcap=hp.attn_softcap,
            wide=hp.max_alibi_bias > 0,
            ranged=cfg.media is not None and cfg.media.both and (hp.arch != "gemma4" or hp.window > 0),
        )
    if cfg.v_hadamard:
        kqv = g.hadamard(kqv, hp.n_head, hp.head_dim_v, "kqv_hadamard")
    matrix = layer.get("attn_gate")
    if matrix is not None:
        gate = g.mul_mat(matrix, x, "attn_gate")
    if gate is not None:
        kqv = g.gate(kqv, gate, "attn_gated", gating)
    return kqv


def attend_all(g: Graph, hp: HParams, q: Node, k: Node, v: Node, biases: tuple[tuple[float, ...], ...] = ()) -> Node:
    """Attend in both directions, over the keys and values of the micro-batch; `biases`: see `Attention`."""
    d, d_v = hp.head_dim_k, hp.head_dim_v
    return g.attention(
        [HeadSlice(q, 0, d, d)],
        [HeadSlice(k, 0, d, d)],
        HeadSlice(v, 0, d_v, d_v),
        "kqv",
        n_head=hp.n_head,
        n_head_kv=hp.n_head_kv,
        scale=hp.attention_scale or 1.0 / math.sqrt(d),
        flash=True,  # it is exact, and nothing of it is kept
        window=hp.window,
        both=True,
        biases=biases,
        slopes=alibi.slopes(hp.n_head, hp.max_alibi_bias) if hp.max_alibi_bias else (),
    )


def _query_and_gate(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> dict[str, Node]:
    """Return both parts of a projection whose heads are [query | gate]."""
    cur, d = g.mul_mat(layer.attn_q, x, "Qcur_full"), hp.head_dim_k
    names = {"q": "Qcur_proj", "gate": "gate"}
    return {part: g.concat_heads([HeadSlice(cur, i * d, d, 2 * d)], hp.n_head, name)
            for i, (part, name) in enumerate(names.items())}  # fmt: skip


def attention_matrix(hp: HParams, layer: LayerWeights, which: str) -> Weight:
    """Return the matrix of q, k or v: a separate tensor, or its rows of the fused one."""
    own = layer.get(f"attn_{which}")
    return layer.attn_qkv.rows(*_fused_rows(hp)[which]) if own is None else own


def _fused_rows(hp: HParams) -> dict[str, tuple[int, int]]:
    """Return first row and number of rows of q, k and v in the fused matrix."""
    n_q, n_k = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k
    return {"q": (0, n_q), "k": (n_q, n_k), "v": (n_q + n_k, hp.n_head_kv * hp.head_dim_v)}


def _fused_projections(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> dict[str, Node]:
    """Return q, k and v where they are computed together and have a bias or a limit; empty elsewhere."""
    w, bias = layer.get("attn_qkv"), layer.get("attn_qkv_bias")
    if w is None or (bias is None and not hp.clamp_kqv):
        return {}
    cur = g.clamp(linear(g, w, bias, x, "bqkv"), hp.clamp_kqv, "wqkv_clamped")
    return {which: columns(g, cur, *rows, f"{which.upper()}cur_proj") for which, rows in _fused_rows(hp).items()}


def _project(
    g: Graph,
    hp: HParams,
    x: Node,
    layer: LayerWeights,
    table: Node | None,
    which: str,
    n_head: int,
    neox: bool,
    norm_last: bool,
    cur: Node | None = None,
) -> Node:
    """Project q or k (or take `cur`), norm each head (or all) if the model does, and rotate."""
    if cur is None:
        bias = layer.get(f"attn_{which}_bias")
        cur = linear(g, attention_matrix(hp, layer, which), bias, x, f"{which.upper()}cur_proj")
        cur = g.clamp(cur, hp.clamp_kqv, f"{which.upper()}cur_clamped")
    return rotated(g, hp, cur, layer, table, which, n_head, neox, norm_last)


def rotated(
    g: Graph,
    hp: HParams,
    cur: Node,
    layer: LayerWeights,
    table: Node | None,
    which: str,
    n_head: int,
    neox: bool,
    norm_last: bool = False,
) -> Node:
    """Norm heads of q or k if the model does, and rotate them."""
    name = f"{which.upper()}cur"
    norm = layer.get(f"attn_{which}_norm")
    if norm is not None and not norm_last:
        cur = _head_norm(g, hp, cur, norm, f"{name}_normed", layer.get(f"attn_{which}_norm_bias"))
    if table is not None:
        cur = g.rope(cur, table, n_head, hp.head_dim_k, name, neox=neox)
    if norm is not None and norm_last:
        cur = _head_norm(g, hp, cur, norm, f"{name}_normed")
    return cur


def _head_norm(g: Graph, hp: HParams, x: Node, w: Weight, name: str, bias: Weight | None = None) -> Node:
    """Apply the norm of the model's kind to groups of columns: heads, or all of them."""
    if hp.norm == "rms" and w.ne1 == 1:
        return g.rms_norm(x, w, hp.eps, name)
    return g.norm(x, w, hp.eps, name, b=bias, kind=hp.norm, width=w.ne0)


def heads_per_step(cfg: GraphConfig, n_head: int) -> int:
    """Return the heads whose K*Q is materialised at once under `-amb` without flash attention; 0 = all."""
    mib = cfg.n_ctx * n_head * cfg.n_ubatch * 4 >> 20
    if cfg.flash_attn or cfg.amb <= 0 or mib <= cfg.amb:
        return 0
    steps = min(-(-mib // cfg.amb), n_head)
    return -(-n_head // steps)


def columns(g: Graph, x: Node, first: int, n: int, name: str) -> Node:
    """Return n columns of x, from `first` on."""
    return g.concat_heads([HeadSlice(x, first, n, 0)], 1, name)
