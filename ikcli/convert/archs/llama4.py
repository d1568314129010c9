"""Llama 4 (text): experts in some layers, layers without rotation."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

LLAMA4: b.Table = {
    "layers.*.feed_forward.experts.gate_up_proj": b.fused_experts(
        "blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight", transposed=True
    ),
    "layers.*.feed_forward.experts.down_proj": b.fused_experts("blk.*.ffn_down_exps.weight", transposed=True),
}  # fmt: skip


def _llama4(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, n_ff=False)
    k.rms_eps(m)
    width = k.head_dim(m)
    k.rope(m)
    m.key("vocab_size", c.integer("vocab_size"))
    m.key("rope.dimension_count", width)
    m.key("feed_forward_length", c.integer("intermediate_size_mlp", least=1))
    m.key("expert_feed_forward_length", c.integer("intermediate_size", least=1))
    k.experts(m, "num_local_experts", width=False)
    step = c.integer("interleave_moe_layer_step", default=1, least=1)
    m.key("interleave_moe_layer_step", step)
    expected = [i for i in range(m.n_layer) if (i + 1) % step == 0]
    if (c.items("moe_layers") or expected) != expected:
        raise c.refuse("moe_layers", f"{expected}")
    m.key("attention.sliding_window", c.integer("attention_chunk_size", default=8192))
    c.expect("attention_chunk_size", 8192)
    rotated = c.items("no_rope_layers")
    if rotated and rotated != [int((i + 1) % 4 != 0) for i in range(m.n_layer)]:
        raise c.refuse("no_rope_layers", "every fourth layer without rotation")
    m.key("attention.temperature_scale", c.number("attn_scale") if c.flag("attn_temperature_tuning") else None)
    m.key("attention.temperature_length", c.integer("floor_scale"))
    c.expect("attn_temperature_tuning", True, 4)
    c.expect("use_qk_norm", c.integer("num_local_experts") != 128)
    c.ignore("layer_types", "no_rope_layer_interval", "attention_bias", "for_llm_compressor")


def _finish_llama4(m: b.Build) -> None:
    k.put_llama3(m, m.metadata["llama4.rope.dimension_count"])
    k.tied(m)


ARCHITECTURES = (
    b.Architecture(
        "llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _llama4, LLAMA4, _finish_llama4,
        r"vision_model|multi_modal_projector",
    ),
)  # fmt: skip
