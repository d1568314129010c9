"""StarCoder 1 and 2, and CodeShell."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

STARCODER: b.Table = {"h.*.attn.bias": b.drop, "h.*.attn.masked_bias": b.drop}


def _starcoder(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH, keys=k.ACTIVATION_KEYS)
    k.old_sizes(m, c.integer("n_inner", default=4 * k.embd(m)), 1)
    k.layer_eps(m)
    c.expect("multi_query", True)
    c.expect("scale_attn_weights", True)


def _starcoder2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.rope(m)
    k.layer_eps(m)
    if c.get("sliding_window"):
        m.key("attention.sliding_window", c.integer("sliding_window"))
    c.ignore("use_bias")
    c.expect("norm_type", "layer_norm")
    c.expect("mlp_type", "default")
    c.ignore("vocab_size")


def _codeshell(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH, keys=k.ACTIVATION_KEYS)
    if not c.flag("group_query_attention", default=True):
        raise c.refuse("group_query_attention", "true")
    k.old_sizes(m, c.integer("n_inner", default=4 * c.integer("n_embd")), c.integer("num_query_groups", least=1))
    k.layer_eps(m, 1e-5)
    k.rope(m)
    c.expect("position_embedding_type", "rope")
    c.expect("scale_attn_weights", True)


ARCHITECTURES = (
    b.Architecture(
        "starcoder", ("GPTBigCodeForCausalLM",), _starcoder, STARCODER, k.tied_by_default, strip="transformer."
    ),
    b.Architecture("starcoder2", ("Starcoder2ForCausalLM",), _starcoder2, finish=k.tied_by_default),
    b.Architecture("codeshell", ("CodeShellForCausalLM",), _codeshell, STARCODER, k.own_output, strip="transformer."),
)  # fmt: skip
