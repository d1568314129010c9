"""Mellum."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import put_yarn, read_rope
from ikcli.errors import UnsupportedError


def _mellum(m: b.Build) -> None:
    c = m.config
    k.base(m)
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    m.key("rope.freq_base", full.theta)
    if full.type == "yarn":
        put_yarn(m, full)
    elif full.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {full.type} is not known for {m.arch}")
    k.experts(m, "num_local_experts", "num_experts")
    c.expect("norm_topk_prob", True)
    is_window = k.windows(m, 4)
    if any(is_window):
        m.key("attention.sliding_window", c.integer("sliding_window", least=1))
        m.key("attention.sliding_window_pattern", is_window)
        m.key("rope.freq_base_swa", own.theta)
    elif "mellum.attention.sliding_window_pattern" in m.metadata:
        del m.metadata["mellum.attention.sliding_window_pattern"]
        c.ignore("sliding_window")
    if set(c.items("mlp_layer_types") or ["sparse"]) != {"sparse"}:
        raise c.refuse("mlp_layer_types", "sparse in all layers")
    c.expect("decoder_sparse_step", 1)
    c.ignore("use_sliding_window", "max_window_layers", "mlp_only_layers")


ARCHITECTURES = (b.Architecture("mellum", ("MellumForCausalLM",), _mellum, finish=k.tied, names="qwen3moe"),)
