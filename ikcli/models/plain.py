"""Plain transformers: blocks of self-attention and a feed-forward part or experts, which differ only in settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ikcli.graph import Graph, Node
from ikcli.graph.activations import SILU, Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward, fused_dense_ffn, limited_feed_forward, mlp
from ikcli.models.gpt_oss import ACTIVATION
from ikcli.models.hparams import HParams
from ikcli.models.sparse import indexer
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

More = Callable[[HParams, int], TensorSpecs]


@dataclass(frozen=True, slots=True)
class Plain:
    """Settings of an architecture; what a file's metadata say (heads, windows, experts, factors) is in `HParams`.

    `bias`, `qk_norm`, `fused`, `ffn_norm`: see `expected.attention_specs`. `neox`, `norm_last`: see
    `blocks.self_attention`. `act`: the activation of all feed-forward parts. `fused_gate_up`: one matrix for gate and
    up. `ungated`: the activation of a dense part without gate. `nope_interval`: every n-th block has no RoPE (NoPE; 0:
    none). `rotates`: blocks have RoPE at all. `limited`: the file limits the activations of experts. `more`: further
    tensors of block il.
    """

    bias: bool | None = None
    qk_norm: bool | None = False
    fused: bool | None = None
    ffn_norm: str = "ffn_norm"
    neox: bool = True
    norm_last: bool = False
    act: Glu = SILU
    fused_gate_up: bool = False
    ungated: str = ""
    nope_interval: int = 0
    rotates: bool = True
    limited: bool = False
    more: More = lambda hp, il: {}


def _sinks(hp: HParams, il: int) -> TensorSpecs:
    return {f"blk.{il}.attn_sinks.weight": TensorSpec((hp.at(il).n_head,), required=False)}


def _shared_gate(hp: HParams, il: int) -> TensorSpecs:
    return {f"blk.{il}.ffn_gate_inp_shexp.weight": TensorSpec((hp.n_embd, 1))}


def _head_gates(hp: HParams, il: int) -> TensorSpecs:
    return {f"blk.{il}.attn_gate.weight": TensorSpec((hp.n_embd, hp.at(il).n_head))}


def _qkv_bias(hp: HParams, il: int) -> TensorSpecs:
    n = hp.n_head * hp.head_dim_k + hp.n_head_kv * (hp.head_dim_k + hp.head_dim_v)
    return {f"blk.{il}.attn_qkv.bias": TensorSpec((n,))}


def _biased_norms(hp: HParams, il: int) -> TensorSpecs:
    bias = TensorSpec((hp.n_embd,))
    return {f"blk.{il}.attn_norm.bias": bias, f"blk.{il}.ffn_norm.bias": bias, "output_norm.bias": bias}


def _output_bias(hp: HParams, il: int) -> TensorSpecs:
    return {"output.bias": TensorSpec((hp.n_vocab,), required=False)}


def _llama3_factors(hp: HParams, il: int) -> TensorSpecs:
    return {"rope_freqs.weight": TensorSpec((hp.n_rot // 2,), required=False)}


def _groups(hp: HParams, il: int) -> TensorSpecs:
    n = hp.n_expert // hp.experts_per_group
    up, down = TensorSpec((hp.n_embd, hp.n_ff_group, n)), TensorSpec((hp.n_ff_group, hp.n_embd, n))
    return {f"blk.{il}.ffn_{part}_chexps.weight": down if part == "down" else up for part in ("gate", "up", "down")}


def _indexer(hp: HParams, il: int) -> TensorSpecs:
    return expected.in_block(il, indexer.specs(hp, il))


def _phimoe(hp: HParams, il: int) -> TensorSpecs:
    return _biased_norms(hp, il) | _output_bias(hp, il) | expected.long_rope(hp, il)


_PAIRS = Plain(neox=False)  # rotates adjacent pairs, as llama does
_NORMED = Plain(bias=False, qk_norm=True)

TABLE: dict[str, Plain] = {
    "apertus": Plain(bias=False, qk_norm=True, ungated="xielu", more=_llama3_factors),
    "arcee": Plain(neox=False, ungated="relu_sqr", more=_llama3_factors),
    "bailingmoe": _PAIRS,
    "bailingmoe2": Plain(qk_norm=True, fused=True),
    "chatglm": Plain(neox=False, fused_gate_up=True),
    "dbrx": Plain(fused=True, ffn_norm="attn_output_norm"),
    "deepseek": _PAIRS,
    "dots1": _NORMED,
    "ernie4_5": _PAIRS,
    "ernie4_5-moe": _PAIRS,
    "eurobert": Plain(),
    "gemma": Plain(act=Glu("gelu")),
    "exaone-moe": Plain(bias=False, qk_norm=True),
    "glm4moe": Plain(qk_norm=None, ffn_norm="post_attention_norm"),
    "granite": _PAIRS,
    "granite_swa": Plain(neox=False, more=_sinks),
    "granitemoe": _PAIRS,
    "grovemoe": Plain(bias=None, qk_norm=True, more=_groups),
    "hunyuan-dense": Plain(bias=False, qk_norm=True, norm_last=True),
    "hunyuan-moe": Plain(bias=False, qk_norm=True, norm_last=True),
    "hy_v3": _NORMED,
    "jais": Plain(fused=True, rotates=False, more=_biased_norms),
    "maincoder": Plain(bias=False, qk_norm=True, neox=False, norm_last=True),
    "maple": Plain(bias=False, qk_norm=True, limited=True),
    "mellum": Plain(qk_norm=True),
    "mimo2": Plain(more=_sinks),
    "minimax-m2": Plain(bias=False, more=expected.norms_of_all_heads),
    "minimax-m3": Plain(qk_norm=True, act=ACTIVATION, more=_indexer),
    "olmoe": Plain(bias=False, more=expected.norms_of_all_heads),
    "openelm": Plain(bias=False, qk_norm=True, fused=True),
    "paddleocr": Plain(),
    "pangu-embedded": Plain(bias=True, more=_output_bias),
    "phi3": Plain(fused_gate_up=True, more=expected.long_rope),
    "phimoe": Plain(more=_phimoe),
    "qwen": Plain(fused=True, more=_qkv_bias),
    "qwen2": Plain(bias=True),
    "qwen2moe": Plain(bias=True, more=_shared_gate),
    "qwen2vl": Plain(bias=True),  # text: all sections of the rotation have one position
    "qwen3": _NORMED,
    "qwen3moe": _NORMED,
    "qwen3vl": _NORMED,
    "qwen3vlmoe": _NORMED,
    "seed_oss": Plain(ffn_norm="post_attention_norm"),
    "spark2_5": Plain(bias=False, act=Glu("gelu_erf"), more=_head_gates),
    "smollm3": Plain(neox=False, nope_interval=4),
}
"""By the architecture name of the file; what each is called elsewhere: docs/models.md."""


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    return expected.with_blocks(hp, block_shapes)


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    p = TABLE[hp.arch]
    specs = expected.attention_specs(hp, il, bias=p.bias, qk_norm=p.qk_norm, ffn_norm=p.ffn_norm, fused=p.fused)
    if p.ungated:
        specs |= (parts := expected.mlp_specs(hp, il))
        specs |= expected.bias_specs(parts, "ffn_up ffn_down", required=False)
    else:
        specs |= expected.fused_dense_specs(hp, il) if p.fused_gate_up else expected.feed_forward_specs(hp, il)
    return specs | p.more(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    own = layers(g, hp, w, cfg)
    return blocks.transformer(g, hp, w, own.attn, own.ffn, own.ffn_norm)


def layers(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None) -> blocks.Layers:
    """Return the layers, after what they share has been recorded."""
    p = TABLE[hp.arch]
    tables = blocks.rope_tables(g, hp, w, cfg, only) if p.rotates else (None,) * hp.n_layer

    def attn(x: Node, layer: LayerWeights) -> Node:
        rotation = None if p.nope_interval and (layer.il + 1) % p.nope_interval == 0 else tables[layer.il]
        selected = indexer.chosen_blocks(g, hp, cfg, x, layer, rotation) if hp.index_block else None
        return blocks.self_attention(
            g, hp, cfg, x, layer, rotation, neox=p.neox, norm_last=p.norm_last, selected=selected
        )

    def ffn(x: Node, layer: LayerWeights) -> Node:
        if p.ungated:
            return mlp(g, x, layer, p.ungated, xielu=hp.at(layer.il).xielu)
        if p.fused_gate_up:
            return fused_dense_ffn(g, hp, x, layer)
        if p.limited:
            return limited_feed_forward(g, hp, cfg, x, layer)
        return feed_forward(g, hp, cfg, x, layer, p.act)

    return blocks.Layers(attn, ffn, p.ffn_norm)
