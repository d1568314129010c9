"""BitNet b1.58: ternary matrices with a number beside each, which `ternary.py` reads."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _keys(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU, "relu2")
    if c.get("hidden_act", default="silu") != ("relu2" if m.arch == "bitnet-b1.58" else "silu"):
        m.key("hidden_act", "relu2" if c.get("hidden_act") == "relu2" else "silu")
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("rope.dimension_count", k.head_width(m))
    if not any(name.endswith("_proj.weight_scale") for name in m.source.names):
        raise c.fail("quantization_config", "is missing; copy the one of the published checkpoint")
    k.no_window(m)
    k.biases(m)
    c.ignore("head_dim")


_PLACES = {"self_attn.q": "attn_q", "self_attn.k": "attn_k", "self_attn.v": "attn_v", "self_attn.o": "attn_output",
           "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down"}  # fmt: skip

BITNET: b.Table = {
    "lm_head": "output",
    "layers.*.self_attn.inner_attn_ln": "blk.*.attn_sub_norm",
    "layers.*.self_attn.attn_sub_norm": "blk.*.attn_sub_norm",
    "layers.*.mlp.ffn_layernorm": "blk.*.ffn_sub_norm",
    "layers.*.mlp.ffn_sub_norm": "blk.*.ffn_sub_norm",
    **{f"layers.*.{part}_proj.weight_scale": b.to(f"blk.*.{place}.scale!") for part, place in _PLACES.items()},
}

_HARMLESS = frozenset({"input_bits", "weight_bits"})

ARCHITECTURES = (
    b.Architecture("bitnet", ("BitnetForCausalLM",), _keys, BITNET, k.tied, harmless=_HARMLESS),
    b.Architecture(
        "bitnet-b1.58", ("BitNetForCausalLM",), _keys, BITNET, k.tied_by_default, harmless=_HARMLESS, names="bitnet"
    ),
)
