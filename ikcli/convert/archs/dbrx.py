"""DBRX."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Matrix, Piece, TensorRows, turn
from ikcli.convert.rope import put_rope, read_rope
from ikcli.errors import FormatError


def _dbrx(m: b.Build) -> None:
    c = m.config
    ffn = c.inner("ffn_config")
    if ffn.get("moe_normalize_expert_weights", 1.0) != 1.0:
        raise c.refuse("ffn_config", "moe_normalize_expert_weights 1")
    if ffn.get("ffn_act_fn") not in (None, {"name": "silu"}):
        raise c.refuse("ffn_config", "ffn_act_fn silu")
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_seq_len", "max_position_embeddings", least=1))
    m.key("embedding_length", c.integer("d_model", "hidden_size", least=1))
    m.key("feed_forward_length", c.inner_integer("ffn_config", "ffn_hidden_size", 3584))
    m.key("attention.head_count", c.integer("n_heads", "num_attention_heads", least=1))
    m.key("attention.head_count_kv", c.inner_integer("attn_config", "kv_n_heads", 1))
    found = read_rope(c)
    theta = c.inner_number("attn_config", "rope_theta", found.theta)
    if c.given("rope_parameters") and theta != found.theta:
        raise c.refuse("attn_config", f"rope_theta {found.theta}, as in rope_parameters")
    put_rope(m, found)
    m.key("rope.freq_base", theta)
    m.key("attention.clamp_kqv", c.inner_number("attn_config", "clip_qkv", 0.0))
    m.key("attention.layer_norm_epsilon", 1e-5)
    m.key("expert_count", c.inner_integer("ffn_config", "moe_num_experts", 4))
    m.key("expert_used_count", c.inner_integer("ffn_config", "moe_top_k", 1))
    c.ignore("vocab_size", "num_key_value_heads", "emb_pdrop", "resid_pdrop")


def _experts_in_rows(name: str, turned: bool = False) -> b.Rule:
    """Split rows into one matrix per expert; `turned` transposes each of them."""

    def rule(m: b.Build, found: b.Found) -> None:
        rows, width = found.matrix()
        n_expert = int(m.metadata[f"{m.arch}.expert_count"])
        n = rows // n_expert
        if n * n_expert != rows:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has {rows} rows for {n_expert} experts")
        pieces: list[Piece] = []
        for e in range(n_expert):
            if turned:
                pieces.append(Matrix(found.name, width, n, e * n, (e + 1) * n, turn))
            else:
                pieces.append(TensorRows(found.name, n, width, e * n))
        shape = (n, width, n_expert) if turned else (width, n, n_expert)
        m.add(f"blk.{found.block}.{name}.weight", pieces, shape)

    return rule


DBRX: b.Table = {
    "blocks.*.ffn.experts.mlp.w1": _experts_in_rows("ffn_gate_exps"),
    "blocks.*.ffn.experts.mlp.v1": _experts_in_rows("ffn_up_exps"),
    "blocks.*.ffn.experts.mlp.w2": _experts_in_rows("ffn_down_exps", turned=True),
}


ARCHITECTURES = (b.Architecture("dbrx", ("DbrxForCausalLM",), _dbrx, DBRX, k.tied, strip="transformer."),)
