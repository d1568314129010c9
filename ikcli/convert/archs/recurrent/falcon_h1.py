"""Falcon-H1: factors of config.json are multiplied into the matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.recurrent.mamba2 import mixer, no_limits, sizes


def _keys(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    k.head_dim(m)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    heads = c.integer("mamba_n_heads", least=1)
    inner = c.integer("mamba_d_ssm", default=c.integer("mamba_expand", default=2) * k.embd(m), least=1)
    sizes(m, "mamba_d_conv", "mamba_d_state", "mamba_n_groups", heads, inner // heads)
    no_limits(m, "time_step_limit")
    c.expect("mamba_conv_bias", True)
    c.expect("mamba_proj_bias", False)
    c.expect("projectors_bias", False)
    c.expect("mamba_use_mlp", True)
    c.expect("attn_layer_indices")
    if c.flag("mamba_rms_norm"):
        c.expect("mamba_norm_before_gate", False)
    k.biases(m)
    c.ignore("mamba_d_head", "mamba_norm_before_gate")
    c.ignore(*_FACTORS)


_FACTORS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
    "lm_head_multiplier", "mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier",
)  # fmt: skip


def _product(*names: str) -> Callable[[b.Build], float]:
    """Return a function that multiplies factors of config.json."""

    def factor(m: b.Build) -> float:
        found = 1.0
        for name in names:
            found *= m.config.number(name, default=1.0)
        return found

    return factor


def _item(name: str, n: int, of: int) -> Callable[[b.Build], float]:
    """Return a function that reads an item of a list of factors."""
    return lambda m: _list(m, name, of)[n]


def _list(m: b.Build, name: str, n: int) -> list[float]:
    values = m.config.items(name) or [1.0] * n
    if len(values) != n or not all(isinstance(v, int | float) for v in values):
        raise m.config.fail(name, f"should hold {n} numbers")
    return [float(v) for v in values]


def _inputs(m: b.Build) -> Sequence[tuple[int, float]]:
    """Return rows and factor of the gate, x, b, c and the steps."""
    c, whole = m.config, m.config.number("ssm_in_multiplier", default=1.0)
    inner, heads = m.metadata["falcon-h1.ssm.inner_size"], c.integer("mamba_n_heads")
    shared = c.integer("mamba_n_groups", default=1) * c.integer("mamba_d_state")
    factors = _list(m, "ssm_multipliers", 5)
    return [(n, whole * f) for n, f in zip((inner, inner, shared, shared, heads), factors, strict=True)]


def _finish(m: b.Build) -> None:
    """Settle the output matrix; where it is that of the embeddings, it differs from them by its factor."""
    c = m.config
    if c.flag("tie_word_embeddings") and _product("lm_head_multiplier")(m) != _product("embedding_multiplier")(m):
        m.tensors.pop("output.weight", None)
        name = next(n for n in m.source.names if n.endswith("embed_tokens.weight"))
        found = b.Found(name, m.source.shape(name), ".weight", -1, -1)
        b.scaled("output", _product("lm_head_multiplier"))(m, found)
        return
    k.tied(m)


_ATTENTION = "attention_in_multiplier"
FALCON_H1: b.Table = mixer("mamba") | {
    "embed_tokens": b.scaled("token_embd", _product("embedding_multiplier")),
    "lm_head": b.scaled("output", _product("lm_head_multiplier")),
    "final_layernorm": "output_norm",
    "layers.*.input_layernorm": "blk.*.attn_norm",
    "layers.*.pre_ff_layernorm": "blk.*.ffn_norm",
    "layers.*.self_attn.q_proj": b.scaled("blk.*.attn_q", _product(_ATTENTION)),
    "layers.*.self_attn.k_proj": b.scaled("blk.*.attn_k", _product(_ATTENTION, "key_multiplier")),
    "layers.*.self_attn.v_proj": b.scaled("blk.*.attn_v", _product(_ATTENTION)),
    "layers.*.self_attn.o_proj": b.scaled("blk.*.attn_output", _product("attention_out_multiplier")),
    "layers.*.mamba.in_proj": b.scaled("blk.*.ssm_in", _inputs),
    "layers.*.mamba.out_proj": b.scaled("blk.*.ssm_out", _product("ssm_out_multiplier")),
    "layers.*.feed_forward.gate_proj": b.scaled("blk.*.ffn_gate", _item("mlp_multipliers", 0, 2)),
    "layers.*.feed_forward.up_proj": "blk.*.ffn_up",
    "layers.*.feed_forward.down_proj": b.scaled("blk.*.ffn_down", _item("mlp_multipliers", 1, 2)),
}

_HARMLESS = frozenset(
    {"mamba_chunk_size", "mamba_expand", "mlp_expansion_factor", "num_logits_to_keep", "time_step_floor",
     "time_step_max", "time_step_min", "layers_block_type", "layer_types"}
)  # fmt: skip

ARCHITECTURES = (b.Architecture("falcon-h1", ("FalconH1ForCausalLM",), _keys, FALCON_H1, _finish, harmless=_HARMLESS),)
