"""GPT-2."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Matrix, turn


def turned(name: str) -> b.Rule:
    """Transpose a matrix of a Conv1D module; keep a bias."""

    def rule(m: b.Build, found: b.Found) -> None:
        full = f"{name.replace('*', str(found.block))}{found.suffix}"
        if len(found.shape) == 1:
            m.plain(found, full)
            return
        n_in, n_out = found.matrix()
        m.add(full, (Matrix(found.name, n_out, n_in, 0, n_in, turn),))

    return rule


GPT2: b.Table = {
    "h.*.attn.c_attn": turned("blk.*.attn_qkv"),
    "h.*.attn.c_proj": turned("blk.*.attn_output"),
    "h.*.mlp.c_fc": turned("blk.*.ffn_up"),
    "h.*.mlp.c_proj": turned("blk.*.ffn_down"),
    "h.*.attn.bias": b.drop,
    "h.*.attn.masked_bias": b.drop,
}


def _gpt2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH, keys=k.ACTIVATION_KEYS)
    k.old_sizes(m, c.integer("n_inner", default=4 * k.embd(m)))
    k.layer_eps(m)
    c.expect("scale_attn_weights", True)
    c.expect("scale_attn_by_inverse_layer_idx", False)
    c.ignore("reorder_and_upcast_attn", "n_ctx")


ARCHITECTURES = (b.Architecture("gpt2", ("GPT2LMHeadModel",), _gpt2, GPT2, k.tied_by_default, strip="transformer."),)
