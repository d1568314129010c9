"""Models whose layers run several times: Nanbeige 4.2 and Ouro."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.llama import finish, llama_keys

OURO: b.Table = b.PAIRS | {
    "layers.*.input_layernorm_2": "blk.*.post_attention_norm",
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "layers.*.post_attention_layernorm_2": "blk.*.post_ffw_norm",
    "early_exit_gate": b.drop,
}


def _nanbeige(m: b.Build) -> None:
    c = m.config
    llama_keys(m)
    m.key("num_loops", c.integer("num_loops", least=1))
    m.key("skip_loop_final_norm", c.flag("skip_loop_final_norm", default=False))
    c.expect("attention_bias", False)
    c.ignore("kv_channels", "loop_loss_weights")
    k.no_window(m)


def _ouro(m: b.Build) -> None:
    c = m.config
    llama_keys(m)
    m.key("num_loops", c.integer("total_ut_steps", default=4, least=1))
    m.key("skip_loop_final_norm", False)
    c.expect("early_exit_threshold", 1.0, 1)  # below, the model may leave out runs of its layers
    k.no_window(m)


ARCHITECTURES = (
    b.Architecture("nanbeige", ("NanbeigeForCausalLM",), _nanbeige, b.PAIRS, finish, names="llama"),
    b.Architecture("ouro", ("OuroForCausalLM",), _ouro, OURO, finish, names="llama"),
)
