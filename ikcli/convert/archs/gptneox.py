"""GPT-NeoX and Pythia."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _gptneox(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.partial_rope(m, k.head_width(m))
    k.layer_eps(m)
    m.key("attention.head_count_kv", c.integer("num_attention_heads"))
    m.key("use_parallel_residual", c.flag("use_parallel_residual", default=True))
    c.ignore("vocab_size", "attention_bias")


def head_by_head(m: b.Build, found: b.Found) -> None:
    """Reorder (query, key, value) of each head into all queries, all keys, all values."""
    n_head = m.config.integer("num_attention_heads", "n_head")
    if found.shape[0] % (3 * n_head):
        raise m.config.fail("num_attention_heads", f"is {n_head}, which does not fit {found.shape[0]} rows")
    order = np.arange(found.shape[0]).reshape(n_head, 3, -1).swapaxes(0, 1).reshape(-1)
    m.plain(found, f"blk.{found.block}.attn_qkv{found.suffix}", order=order)


GPTNEOX: b.Table = {
    "layers.*.attention.query_key_value": head_by_head,
    "layers.*.attention.bias": b.drop,
    "layers.*.attention.masked_bias": b.drop,
}


ARCHITECTURES = (b.Architecture("gptneox", ("GPTNeoXForCausalLM",), _gptneox, GPTNEOX, k.tied, strip="gpt_neox."),)
