"""Expected tensors of the blocks in `blocks.py`: shapes by name, for `tensor_shapes` of the architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs


def base_specs(hp: HParams) -> TensorSpecs:
    """Return the tensors outside the blocks."""
    return {
        "token_embd.weight": TensorSpec((hp.n_embd, hp.n_vocab)),
        "output_norm.weight": TensorSpec((hp.n_embd,)),
        "output.weight": TensorSpec((hp.n_embd, hp.n_vocab), required=False),
    }


def with_blocks(hp: HParams, block_shapes: Callable[[HParams, int], TensorSpecs]) -> TensorSpecs:
    """Return the tensors outside the blocks and those of every block."""
    specs = base_specs(hp)
    for il in range(hp.n_layer):
        specs |= block_shapes(hp, il)
    return specs


def attention_specs(
    hp: HParams,
    il: int,
    *,
    bias: bool | None,
    qk_norm: bool | None = False,
    ffn_norm: str | None = "ffn_norm",
    fused: bool | None = None,
) -> TensorSpecs:
    """Return norms and projections of one block; `bias` or `qk_norm` None: they are optional.

    `fused`: q, k and v are one matrix; None: one or three, as converters of llama.cpp write either.
    """
    hp = hp.at(il)
    q, k, v = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k, hp.n_head_kv * hp.head_dim_v
    specs = {
        "attn_norm.weight": TensorSpec((hp.n_embd,)),
        "attn_output.weight": TensorSpec((hp.n_head * hp.head_dim_v, hp.n_embd)),
        "attn_output.bias": TensorSpec((hp.n_embd,), required=False),
    }
    if ffn_norm is not None:
        specs[f"{ffn_norm}.weight"] = TensorSpec((hp.n_embd,))
    one = f"blk.{il}.attn_qkv.weight" if fused is None else ""
    if fused is not False:
        specs["attn_qkv.weight"] = TensorSpec((hp.n_embd, q + k + v), required=not one)
    if not fused:
        specs |= {f"attn_{x}.weight": TensorSpec((hp.n_embd, n), unless=one) for x, n in (("q", q), ("k", k), ("v", v))}
    if bias is not False and fused is not False:
        specs["attn_qkv.bias"] = TensorSpec((q + k + v,), required=False)
    if bias is not False and not fused:
        one = one.replace(".weight", ".bias")
        for name, n in (("q", q), ("k", k), ("v", v)):
            specs[f"attn_{name}.bias"] = TensorSpec((n,), required=bool(bias), unless=one)
    if qk_norm is not False:
        norm = TensorSpec((hp.head_dim_k,), required=bool(qk_norm))
        specs["attn_q_norm.weight"] = specs["attn_k_norm.weight"] = norm
    return in_block(il, specs)


def post_norm_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the norms after attention and feed-forward part."""
    norm = TensorSpec((hp.n_embd,))
    return in_block(il, {"post_attention_norm.weight": norm, "post_ffw_norm.weight": norm})


def without_ending(specs: TensorSpecs) -> TensorSpecs:
    """Return specs of tensors whose names lack `.weight` in files of llama.cpp; with it they are accepted, too."""
    bare = {name.removesuffix(".weight"): replace(spec, unless=name) for name, spec in specs.items()}
    return bare | {name: replace(spec, required=False) for name, spec in specs.items()}


def norms_of_all_heads(hp: HParams, il: int, *, each: bool = False, required: bool = True) -> TensorSpecs:
    """Return norms of q and k over the columns of all heads together or, `each`, of every head separately."""
    hp = hp.at(il)
    heads, d = {"q": hp.n_head, "k": hp.n_head_kv}, hp.head_dim_k
    shapes = {f"attn_{x}_norm.weight": (d, n) if each else (n * d,) for x, n in heads.items()}
    return in_block(il, {name: TensorSpec(shape, required) for name, shape in shapes.items()})


def long_rope(hp: HParams, il: int) -> TensorSpecs:
    """Return the factors of LongRoPE, which all blocks share."""
    factors = TensorSpec((hp.n_rot // 2,), required=False)
    return {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors}


def feed_forward_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of `feed_forward`."""
    hp = hp.at(il)
    if not hp.has_experts(il):
        return dense_specs(hp, il, hp.n_ff)
    specs = expert_specs(hp, il, hp.n_ff_exp)
    specs[f"blk.{il}.exp_probs_b.bias"] = TensorSpec((hp.n_expert,), required=False)
    return specs | (dense_specs(hp, il, hp.n_ff_shexp, "_shexp") if hp.n_ff_shexp else {})


def dense_specs(hp: HParams, il: int, n_ff: int, suffix: str = "") -> TensorSpecs:
    """Return a dense feed-forward block."""
    specs = {
        f"ffn_gate{suffix}.weight": TensorSpec((hp.n_embd, n_ff)),
        f"ffn_up{suffix}.weight": TensorSpec((hp.n_embd, n_ff)),
        f"ffn_down{suffix}.weight": TensorSpec((n_ff, hp.n_embd)),
        f"ffn_gate{suffix}.bias": TensorSpec((n_ff,), required=False),
        f"ffn_up{suffix}.bias": TensorSpec((n_ff,), required=False),
        f"ffn_down{suffix}.bias": TensorSpec((hp.n_embd,), required=False),
    }
    return in_block(il, specs)


def fused_dense_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return a dense feed-forward block with one matrix for gate and up."""
    n_ff = hp.at(il).n_ff
    specs = {
        "ffn_up.weight": TensorSpec((hp.n_embd, 2 * n_ff)),
        "ffn_down.weight": TensorSpec((n_ff, hp.n_embd)),
    }
    return in_block(il, specs)


def mlp_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return a dense feed-forward block without gate."""
    n_ff = hp.at(il).n_ff
    return in_block(
        il, {"ffn_up.weight": TensorSpec((hp.n_embd, n_ff)), "ffn_down.weight": TensorSpec((n_ff, hp.n_embd))}
    )


def bias_specs(specs: TensorSpecs, names: str, required: bool = True) -> TensorSpecs:
    """Return biases of the listed tensors (names without `blk.<il>.`) that are among `specs`."""
    listed = names.split()
    return {
        name.removesuffix("weight") + "bias": TensorSpec((spec.shape[-1],), required and spec.required)
        for name, spec in specs.items()
        if name.endswith(".weight") and name.removesuffix(".weight").split(".")[-1] in listed
    }


def expert_specs(hp: HParams, il: int, n_ff: int) -> TensorSpecs:
    """Return router and routed experts, whose gate and up may be one tensor."""
    half, both = (hp.n_embd, n_ff, hp.n_expert), f"blk.{il}.ffn_gate_up_exps.weight"
    specs = {
        "ffn_gate_inp.weight": TensorSpec((hp.n_embd, hp.n_expert)),
        "ffn_gate_exps.weight": TensorSpec(half, unless=both),
        "ffn_up_exps.weight": TensorSpec(half, unless=both),
        "ffn_gate_up_exps.weight": TensorSpec((hp.n_embd, 2 * n_ff, hp.n_expert), required=False),
        "ffn_down_exps.weight": TensorSpec((n_ff, hp.n_embd, hp.n_expert)),
        "ffn_gate_inp.bias": TensorSpec((hp.n_expert,), required=False),
        "ffn_gate_exps.bias": TensorSpec((n_ff, hp.n_expert), required=False),
        "ffn_up_exps.bias": TensorSpec((n_ff, hp.n_expert), required=False),
        "ffn_gate_up_exps.bias": TensorSpec((2 * n_ff, hp.n_expert), required=False),
        "ffn_down_exps.bias": TensorSpec((hp.n_embd, hp.n_expert), required=False),
    }
    return in_block(il, specs)


def in_block(il: int, specs: TensorSpecs) -> TensorSpecs:
    """Prefix names with block il."""
    return {f"blk.{il}.{name}": spec for name, spec in specs.items()}
