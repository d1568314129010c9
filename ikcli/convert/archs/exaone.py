"""EXAONE 3 and 4."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _exaone(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU, keys=k.ACTIVATION_KEYS)
    k.sizes(m)
    k.rope(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", "rms_norm_eps"))
    k.head_dim(m)
    c.ignore("attention_bias", "mlp_bias", "vocab_size")


def _finish_exaone(m: b.Build) -> None:
    c = m.config
    k.put_llama3(m, c.integer("head_dim", default=k.embd(m) // c.integer("num_attention_heads")))
    k.tied(m)


def _exaone4(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    k.head_dim(m)
    if c.get("sliding_window") is not None:
        m.key("attention.sliding_window", c.integer("sliding_window"))
        pattern = c.get("sliding_window_pattern")  # LLLG, or its length
        period = len(pattern) if isinstance(pattern, str) else c.integer("sliding_window_pattern", default=4, least=1)
        k.windows(m, period, 4)
    elif c.items("layer_types") and set(c.items("layer_types") or ()) != {"full_attention"}:
        raise c.refuse("layer_types", "full_attention without sliding_window")
    c.ignore("sliding_window_pattern")
    k.biases(m)


def _finish_exaone4(m: b.Build) -> None:
    k.put_llama3(m, m.config.integer("head_dim", default=k.head_width(m)))
    k.tied(m)


ARCHITECTURES = (
    b.Architecture("exaone", ("ExaoneForCausalLM",), _exaone, finish=_finish_exaone, strip="transformer."),
    b.Architecture("exaone4", ("Exaone4ForCausalLM",), _exaone4, finish=_finish_exaone4),
)
