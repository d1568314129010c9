"""DeepSeek V2, V2.5, V3, R1: multi-head latent attention (MLA) and experts with shared ones; MiniCPM 3 and PLM, dense.

Three file layouts hold the same model (`attn_kv_b`, or `attn_k_b` + `attn_v_b`, or all three); `mla.derive` makes
what a mode needs and the file lacks. A cache row of mla 1..3 is the rotated key (n_rot) followed by the latent.
Query heads are [nope | rope], kv_b rows of one head [k_nope | v]. Corresponds to `build_deepseek2` of ik_llama.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ikcli.graph import Graph, HeadSlice, Node, Per, Weight, power_of_two_parts
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward, mlp
from ikcli.models.hparams import HParams
from ikcli.models.rope import inverse_frequencies, magnitude, yarn_log
from ikcli.models.sparse import indexer
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

_HALVES = ("minicpm3",)  # rotate halves of the rotated part, not adjacent pairs; may have the factors of LongRoPE
_LATENT_EPS = {"kimi-k3": 1e-6, "minicpm3": 1e-6}  # of the norms of latents, where it is not that of the other norms


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file; `mla.derive` decides which of kv_b, k_b, v_b must be there."""
    return expected.with_blocks(hp, block_shapes) | (expected.long_rope(hp, 0) if hp.arch in _HALVES else {})


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    ffn = expected.mlp_specs(hp, il) if hp.arch == "plm" else expected.feed_forward_specs(hp, il)
    return expected.in_block(il, attention_specs(hp) | indexer.specs(hp, il)) | ffn


def attention_specs(hp: HParams) -> TensorSpecs:
    """Return norms and projections of a block with latent attention."""
    nope, rank, n_head, v = hp.head_dim_k - hp.n_rot, hp.kv_lora_rank, hp.n_head, hp.head_dim_v
    specs = {
        "attn_norm.weight": TensorSpec((hp.n_embd,)),
        "attn_kv_a_mqa.weight": TensorSpec((hp.n_embd, hp.kv_row)),
        "attn_kv_a_norm.weight": TensorSpec((rank,)),
        "attn_kv_b.weight": TensorSpec((rank, n_head * (nope + v)), required=False),
        "attn_k_b.weight": TensorSpec((nope, rank, n_head), required=False, also=((nope, rank * n_head),)),
        "attn_v_b.weight": TensorSpec((rank, v, n_head), required=False, also=((rank, v * n_head),)),
        "attn_output.weight": TensorSpec((n_head * v, hp.n_embd)),
        "ffn_norm.weight": TensorSpec((hp.n_embd,)),
    }
    if hp.q_lora_rank:
        specs["attn_q_a.weight"] = TensorSpec((hp.n_embd, hp.q_lora_rank))
        specs["attn_q_a_norm.weight"] = TensorSpec((hp.q_lora_rank,))
        specs["attn_q_b.weight"] = TensorSpec((hp.q_lora_rank, n_head * hp.head_dim_k))
    else:
        specs["attn_q.weight"] = TensorSpec((hp.n_embd, n_head * hp.head_dim_k))
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    own = layers(g, hp, w, cfg)
    return blocks.transformer(g, hp, w, own.attn, own.ffn)


def layers(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None) -> blocks.Layers:
    """Return the layers, after what they share has been recorded."""
    table = blocks.rope_tables(g, hp, w, cfg, 0)[0] if hp.arch in _HALVES else rope_table(g, hp)
    sparse = indexer.Indexer(g, hp, cfg, table) if table is not None and indexer.top_k(hp, cfg) else None

    def attn(x: Node, layer: LayerWeights) -> Node:
        return g.mul_mat(layer.attn_output, attention(g, hp, cfg, x, layer, table, sparse), "kqv_out")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        if hp.arch == "plm":
            return mlp(g, x, layer, "relu_sqr")
        return feed_forward(g, hp, cfg, x, layer)

    return blocks.Layers(attn, ffn)


def attention(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    table: Node | None,
    sparse: indexer.Indexer | None = None,
) -> Node:
    """Record latent attention up to the output projection; without `table` nothing is rotated.

    `hp` holds the numbers of this layer. A layer may have a window, and a norm on the rotated part of the key.
    """
    q_a = _low_rank_query(g, hp, x, layer)
    q = _query(g, hp, x if q_a is None else q_a, layer, table)
    k_rope, latent = _latent(g, hp, x, layer, table)
    selected = sparse.choose(x, q_a, layer) if sparse is not None and q_a is not None else None
    attend = _full_attention if cfg.mla == 0 else _latent_attention
    return attend(g, hp, cfg, q, k_rope, latent, layer, selected)


def attention_scale(hp: HParams) -> float:
    """Return the scale of K*Q, which YaRN raises by the square of 1 + log_multiplier * ln(factor)."""
    if hp.arch in _HALVES:
        return 1 / math.sqrt(hp.head_dim_k)
    mscale = hp.rope.attn_factor * yarn_log(hp.rope, hp.rope.log_mul)
    return mscale * mscale / math.sqrt(hp.head_dim_k)


def rope_table(g: Graph, hp: HParams) -> Node:
    """Return the RoPE table shared by all layers."""
    # The scale above replaces YaRN's magnitude factor, which is divided out of cosine and sine again.
    mscale = magnitude(hp.rope, 1.0 / yarn_log(hp.rope))
    return g.rope_table(inverse_frequencies(hp.rope, hp.n_rot).tolist(), mscale)


def _low_rank_query(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node | None:
    """Return the normed low-rank query, which `_query` then projects; None in models without one."""
    if not hp.q_lora_rank:
        return None
    return g.rms_norm(g.mul_mat(layer.attn_q_a, x, "q_a"), layer.attn_q_a_norm, _latent_eps(hp), "q_a_norm")


def _latent_eps(hp: HParams) -> float:
    return _LATENT_EPS.get(hp.arch, hp.eps)


def _query(g: Graph, hp: HParams, x: Node, layer: LayerWeights, table: Node | None) -> Node:
    """Return query heads [nope | rotated] of the low-rank query, or of the input."""
    q = g.mul_mat(layer.attn_q_b if hp.q_lora_rank else layer.attn_q, x, "q")
    if table is not None:
        q = g.rope(
            q, table, hp.n_head, hp.head_dim_k, "q_rope", neox=hp.arch in _HALVES, offset=hp.head_dim_k - hp.n_rot
        )
    if hp.temperature_scale:  # Mistral Large 3, Mistral 4
        length = hp.temperature_length or hp.rope.n_ctx_orig
        q = g.pos_scale(q, hp.temperature_scale, length, "q_tempered")
    return q


def _latent(g: Graph, hp: HParams, x: Node, layer: LayerWeights, table: Node | None) -> tuple[HeadSlice, Node]:
    """Return the rotated key shared by all heads, and the normed latent."""
    rank = hp.kv_lora_rank
    kv_a = g.mul_mat(layer.attn_kv_a_mqa, x, "kv_rope_compressed")
    latent = g.rms_norm(kv_a, layer.attn_kv_a_norm, _latent_eps(hp), "kv_compressed", cols=rank)
    neox = hp.arch in _HALVES
    norm = layer.get("attn_k_norm")
    if norm is not None and table is not None:
        normed = g.rms_norm(kv_a, norm, hp.eps, "k_rope_normed", offset=rank)
        return HeadSlice(g.rope(normed, table, 1, hp.n_rot, "k_rope", neox=neox), 0, hp.n_rot, 0), latent
    rotated = kv_a if table is None else g.rope(kv_a, table, 1, hp.kv_row, "k_rope", neox=neox, offset=rank)
    return HeadSlice(rotated, rank, hp.n_rot, 0), latent


def _full_attention(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    q: Node,
    k_rope: HeadSlice,
    latent: Node,
    layer: LayerWeights,
    selected: Node | None,
) -> Node:
    """Record mla 0, which caches per-head keys and values of every position."""
    dk, dv, nope = hp.head_dim_k, hp.head_dim_v, hp.head_dim_k - hp.n_rot
    kv = g.mul_mat(layer.attn_kv_b, latent, "kv")
    k = g.concat_heads([HeadSlice(kv, 0, nope, nope + dv), k_rope], hp.n_head, "k_states")
    v = g.concat_heads([HeadSlice(kv, nope, dv, nope + dv)], hp.n_head, "v_states")
    if cfg.k_hadamard:
        q = g.hadamard(q, hp.n_head, dk, "q_hadamard")
        k = g.hadamard(k, hp.n_head, dk, "k_hadamard")
    if cfg.v_hadamard:
        v = g.hadamard(v, hp.n_head, dv, "v_hadamard")
    per = _cells(hp, cfg)
    k_cache = g.cache("k", hp.n_head * dk, cfg.type_k, per=per)
    v_cache = g.cache("v", hp.n_head * dv, cfg.type_v, per=per)
    g.kv_store(k_cache, k, "k_cache_view")
    g.kv_store(v_cache, v, "v_cache_view")
    k_part, v_part = HeadSlice(k_cache, 0, dk, dk), HeadSlice(v_cache, 0, dv, dv)
    q_part, sinks = HeadSlice(q, 0, dk, dk), layer.get("attn_sinks")
    kqv = _attend(g, hp, cfg, [q_part], k_part, v_part, selected, "kqv", n_head_kv=hp.n_head, sinks=sinks)
    return g.hadamard(kqv, hp.n_head, dv, "kqv_hadamard") if cfg.v_hadamard else kqv


def _attend(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    q: list[HeadSlice],
    k: HeadSlice,
    v: HeadSlice,
    selected: Node | None,
    name: str,
    *,
    n_head_kv: int,
    sinks: Weight | None,
) -> Node:
    """Attend to the selected positions, or to all of them."""
    scale = attention_scale(hp)
    if selected is not None:
        return g.sparse_attention(
            q, [k], v, selected, name, n_head=hp.n_head, n_head_kv=n_head_kv, scale=scale, sinks=sinks
        )
    return g.attention(
        q,
        [k],
        v,
        name,
        n_head=hp.n_head,
        n_head_kv=n_head_kv,
        scale=scale,
        sinks=sinks,
        flash=cfg.flash_attn,
        heads_per_step=blocks.heads_per_step(cfg, hp.n_head),
        window=hp.window,
    )


def _cells(hp: HParams, cfg: GraphConfig) -> Per:
    """Return which positions the caches of a layer hold."""
    return Per.WINDOW if hp.window and cfg.n_window else Per.CELL


def _latent_attention(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    q: Node,
    k_rope: HeadSlice,
    latent: Node,
    layer: LayerWeights,
    selected: Node | None,
) -> Node:
    """Record mla 1..3, which cache only rotated key and latent.

    Sparse attention is absorbed in every mode, and so is that of a window, whose positions are few.
    k_hadamard transforms both parts of the row: queries follow, and the part read as V is transformed back.
    """
    cache = g.cache("kv", hp.kv_row, cfg.type_k, per=_cells(hp, cfg))
    row = g.concat_heads([k_rope, HeadSlice(latent, 0, hp.kv_lora_rank, 0)], 1, "kvr")
    if cfg.k_hadamard:
        parts = (*power_of_two_parts(hp.n_rot), *power_of_two_parts(hp.kv_lora_rank))
        row = g.hadamard(row, 1, hp.kv_row, "kvr_hadamard", blocks=parts)
        q = g.hadamard(q, hp.n_head, hp.head_dim_k, "q_rope_hadamard", offset=hp.head_dim_k - hp.n_rot)
    g.kv_store(cache, row, "kv_cache_view")
    # Sinks are those of all heads, so heads that have them are expanded together.
    together = layer.get("attn_sinks") is None or heads_per_expansion(hp, cfg) == hp.n_head
    if cfg.mla >= 2 and cfg.flash_attn and cfg.expand and selected is None and not hp.window and together:
        return _expanded(g, hp, cfg, q, layer)
    v = HeadSlice(cache, hp.n_rot, hp.kv_lora_rank, 0)
    if cfg.mla == 1 and not cfg.flash_attn and selected is None and not hp.window:
        transposed = g.cache("kv_t", hp.kv_lora_rank, cfg.type_v, transposed=True)
        g.kv_store(transposed, latent, "kv_cache_trans_view")
        v = HeadSlice(transposed, 0, hp.kv_lora_rank, 0)
    return _absorbed(g, hp, cfg, q, layer, HeadSlice(cache, 0, hp.kv_row, 0), v, selected)


def _absorbed(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    q: Node,
    layer: LayerWeights,
    k: HeadSlice,
    v: HeadSlice,
    selected: Node | None,
) -> Node:
    """Move queries into the latent space, where all heads share one key and value, and return results through v_b."""
    nope, rank = hp.head_dim_k - hp.n_rot, hp.kv_lora_rank
    k_b = replace(layer.attn_k_b, shape=(nope, rank, hp.n_head))
    v_b = replace(layer.attn_v_b, shape=(rank, hp.head_dim_v, hp.n_head))
    q_latent = g.mul_mat_heads(k_b, HeadSlice(q, 0, nope, hp.head_dim_k), "q_nope2")
    if cfg.k_hadamard:
        q_latent = g.hadamard(q_latent, hp.n_head, rank, "q_nope2_hadamard")
    q_parts = [HeadSlice(q, nope, hp.n_rot, hp.head_dim_k), HeadSlice(q_latent, 0, rank, rank)]
    cfg = replace(cfg, flash_attn=cfg.flash_attn and cfg.mla != 2)
    sinks = layer.get("attn_sinks")
    kqv = _attend(g, hp, cfg, q_parts, k, v, selected, "kqv_compressed", n_head_kv=1, sinks=sinks)
    if cfg.k_hadamard and v.source is k.source:
        kqv = g.hadamard(kqv, hp.n_head, rank, "kqv_compressed_hadamard")
    return g.mul_mat_heads(v_b, HeadSlice(kqv, 0, rank, rank), "kqv")


def _expanded(g: Graph, hp: HParams, cfg: GraphConfig, q: Node, layer: LayerWeights) -> Node:
    """Record the prompt path of mla 2 and 3: expand K and V of all positions from the latent, some heads at a time."""
    cache = g.cache("kv", hp.kv_row, cfg.type_k)
    dk, dv, nope = hp.head_dim_k, hp.head_dim_v, hp.head_dim_k - hp.n_rot
    latent = g.kv_rows(cache, hp.n_rot, hp.kv_lora_rank, "kv_cache_nope")
    if cfg.k_hadamard:
        latent = g.hadamard(latent, 1, hp.kv_lora_rank, "kv_cache_nope_hadamard")
    n = heads_per_expansion(hp, cfg)
    parts = []
    for h in range(0, hp.n_head, n):
        kv = g.mul_mat(layer.attn_kv_b.rows(h * (nope + dv), n * (nope + dv)), latent, "kv_f32")
        part = g.attention(
            [HeadSlice(q, h * dk + nope, hp.n_rot, dk), HeadSlice(q, h * dk, nope, dk)],
            [HeadSlice(cache, 0, hp.n_rot, 0), HeadSlice(kv, 0, nope, nope + dv)],
            HeadSlice(kv, nope, dv, nope + dv),
            "kqv",
            n_head=n,
            n_head_kv=n,
            scale=attention_scale(hp),
            sinks=layer.get("attn_sinks"),
            flash=True,
        )
        parts.append(part)
    return g.concat(parts, "kqv_2d")


def heads_per_expansion(hp: HParams, cfg: GraphConfig) -> int:
    """Return the heads to expand at once under `-amb`: all, or n_head over its smallest divisor that fits, or one."""
    mib = hp.n_head * (hp.head_dim_k - hp.n_rot + hp.head_dim_v) * cfg.n_ctx * 4 >> 20
    if cfg.amb <= 0 or mib <= cfg.amb:
        return hp.n_head
    fitting = (n for n in range(2, hp.n_head) if hp.n_head % n == 0 and mib // n <= cfg.amb)
    return hp.n_head // next(fitting, hp.n_head)
