"""Models whose code is beside them on the hub: Arctic, DBRX, Grok 1; CodeShell, PLaMo, Refact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ikcli.convert.archs.llama import PAIRS, llama_keys
from ikcli.convert.archs.older import ACTIVATION_KEYS, STARCODER, old_sizes
from ikcli.convert.build import Architecture, Build, Found, Rule, Table, drop, expert, in_pairs, split, to
from ikcli.convert.common import (
    GELU_TANH,
    LLAMA,
    SILU,
    activation,
    expert_names,
    experts,
    layer_eps,
    no_window,
    rms_eps,
    rope,
    sizes,
    tied,
)
from ikcli.convert.pieces import Matrix, Order, Piece, TensorRows, turn
from ikcli.convert.rope import put_rope, read_rope
from ikcli.errors import FormatError

_TRANSFORMER = "transformer."


def _dbrx(m: Build) -> None:
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


def _experts_in_rows(name: str, turned: bool = False) -> Rule:
    """Matrices of all experts, one below the other; `turned`: each has the rows that the result has as columns."""

    def rule(m: Build, found: Found) -> None:
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


DBRX: Table = {
    "wte": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "blocks.*.norm_attn_norm.norm_1": "blk.*.attn_norm",
    "blocks.*.norm_attn_norm.norm_2": "blk.*.attn_output_norm",
    "blocks.*.norm_attn_norm.attn.Wqkv": "blk.*.attn_qkv",
    "blocks.*.norm_attn_norm.attn.out_proj": "blk.*.attn_output",
    "blocks.*.ffn.router.layer": "blk.*.ffn_gate_inp",
    "blocks.*.ffn.experts.mlp.w1": _experts_in_rows("ffn_gate_exps"),
    "blocks.*.ffn.experts.mlp.v1": _experts_in_rows("ffn_up_exps"),
    "blocks.*.ffn.experts.mlp.w2": _experts_in_rows("ffn_down_exps", turned=True),
}
ARCTIC: Table = LLAMA | PAIRS | expert_names("block_sparse_moe", names="w1 w3 w2") | {
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm_exps",
    "layers.*.residual_layernorm": "blk.*.ffn_norm",
    "layers.*.residual_mlp.w1": "blk.*.ffn_gate",
    "layers.*.residual_mlp.w3": "blk.*.ffn_up",
    "layers.*.residual_mlp.w2": "blk.*.ffn_down",
}  # fmt: skip


def _arctic(m: Build) -> None:
    c = m.config
    llama_keys(m)
    experts(m, "num_local_experts", width=False)
    no_window(m)
    if c.integer("moe_layer_frequency", default=2) != 1:
        raise c.fail("moe_layer_frequency", "should be 1: experts in every layer")
    if not c.flag("parallel_attn_mlp_res"):
        raise c.fail("parallel_attn_mlp_res", "should be true: a dense part beside the experts")


GROK: Table = {
    "in_out_embed": "token_embd",
    "rms_norm": "output_norm",
    "decoder_layer.*.rms_norm": "blk.*.attn_norm",
    "decoder_layer.*.rms_norm_1": "blk.*.attn_output_norm",
    "decoder_layer.*.rms_norm_2": "blk.*.ffn_norm",
    "decoder_layer.*.rms_norm_3": "blk.*.layer_output_norm",
    "decoder_layer.*.multi_head_attention.query": "blk.*.attn_q",
    "decoder_layer.*.multi_head_attention.key": "blk.*.attn_k",
    "decoder_layer.*.multi_head_attention.value": "blk.*.attn_v",
    "decoder_layer.*.multi_head_attention.linear": "blk.*.attn_output",
    "decoder_layer.*.router": "blk.*.ffn_gate_inp",
    "decoder_layer.*.moe.#.linear": expert("blk.*.ffn_gate_exps"),
    "decoder_layer.*.moe.#.linear_v": expert("blk.*.ffn_up_exps"),
    "decoder_layer.*.moe.#.linear_1": expert("blk.*.ffn_down_exps"),
    # the same under other names
    "embed_tokens": "token_embd",
    "norm.scale": to("output_norm.weight"),
    "lm_head": "output",
    "layers.*.pre_attn_norm.scale": to("blk.*.attn_norm.weight"),
    "layers.*.post_attn_norm.scale": to("blk.*.attn_output_norm.weight"),
    "layers.*.pre_moe_norm.scale": to("blk.*.ffn_norm.weight"),
    "layers.*.post_moe_norm.scale": to("blk.*.layer_output_norm.weight"),
    "layers.*.attn.q_proj": "blk.*.attn_q",
    "layers.*.attn.k_proj": "blk.*.attn_k",
    "layers.*.attn.v_proj": "blk.*.attn_v",
    "layers.*.attn.o_proj": "blk.*.attn_output",
    "layers.*.moe_block.gate": "blk.*.ffn_gate_inp",
    "layers.*.moe_block.experts.#.linear": expert("blk.*.ffn_gate_exps"),
    "layers.*.moe_block.experts.#.linear_v": expert("blk.*.ffn_up_exps"),
    "layers.*.moe_block.experts.#.linear_1": expert("blk.*.ffn_down_exps"),
}


def _grok(m: Build) -> None:
    """Weights of experts are not normalised; the norm behind makes that the same but for its epsilon."""
    c = m.config
    activation(m, *GELU_TANH)
    sizes(m)
    rms_eps(m)
    rope(m)
    experts(m, "num_local_experts", "num_experts", width=False)
    m.key("expert_weights_norm", False)
    width = c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("attn_logit_softcapping", c.number("max_attn_value", "attn_logit_softcapping", default=30.0))
    m.key("attention.output_scale", c.number("attn_output_multiplier", default=width**-0.5))
    m.key("embedding_scale", c.number("embedding_multiplier_scale"))
    m.key("logit_scale", c.number("output_multiplier_scale"))
    c.ignore("vocab_size")


CODESHELL: Table = STARCODER | {"h.*.attn.rotary_emb.inv_freq": drop}


def _codeshell(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH, keys=ACTIVATION_KEYS)
    if not c.flag("group_query_attention", default=True):
        raise c.refuse("group_query_attention", "true")
    old_sizes(m, c.integer("n_inner", default=4 * c.integer("n_embd")), c.integer("num_query_groups", least=1))
    layer_eps(m, 1e-5)
    rope(m)
    c.expect("position_embedding_type", "rope")
    c.expect("scale_attn_weights", True)


def _own_output(m: Build) -> None:
    """Readers of this architecture want a matrix for the output, also where it is that of the embeddings."""
    if "output.weight" not in m.tensors and "token_embd.weight" in m.tensors:
        if not m.config.flag("tie_word_embeddings", default=True):
            raise m.config.fail("tie_word_embeddings", "is false, and the checkpoint has no lm_head.weight")
        embedding = m.tensors["token_embd.weight"]
        m.add("output.weight", embedding.pieces)
    m.config.ignore("tie_word_embeddings")


def _plamo_heads(m: Build) -> tuple[int, int]:
    """(heads of queries, key heads): key heads are counted round, and not in groups."""
    c = m.config
    n_head, shared = c.integer("num_attention_heads", least=1), c.integer("n_shared_head", default=8, least=1)
    if n_head % shared:
        raise c.fail("n_shared_head", f"is {shared}, which does not divide {n_head} heads")
    return n_head, n_head // shared


def _grouped(rotated: bool) -> Callable[[Build, int], Order]:
    """Order of rows in which query heads of one key head are together, and rotated pairs adjacent."""

    def order(m: Build, n: int) -> Order:
        n_head, n_kv = _plamo_heads(m)
        if n % (2 * n_head):
            raise m.config.fail("num_attention_heads", f"is {n_head}, which does not fit {n} rows")
        heads = np.arange(n).reshape(n_head // n_kv, n_kv, n // n_head).swapaxes(0, 1).reshape(n_head, -1)
        return in_pairs(heads) if rotated else heads.reshape(-1)

    return order


def _plamo_keys_order(m: Build, n: int) -> Order:
    n_kv = _plamo_heads(m)[1]
    if n % (2 * n_kv):
        raise m.config.fail("n_shared_head", f"leaves {n_kv} key heads, which do not fit {n} rows")
    return in_pairs(np.arange(n).reshape(n_kv, -1))


PLAMO: Table = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "layers.layers.*.norm": "blk.*.attn_norm",
    "layers.layers.*.self_attn.q_proj": to("blk.*.attn_q", order=_grouped(True)),
    "layers.layers.*.self_attn.k_proj": to("blk.*.attn_k", order=_plamo_keys_order),
    "layers.layers.*.self_attn.v_proj": "blk.*.attn_v",
    "layers.layers.*.self_attn.o_proj": to("blk.*.attn_output", columns=_grouped(False)),
    "layers.layers.*.self_attn.rotary_emb.inv_freq": drop,
    "layers.layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "layers.layers.*.mlp.up_proj": "blk.*.ffn_up",
    "layers.layers.*.mlp.down_proj": "blk.*.ffn_down",
}


def _plamo(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_position_embeddings", default=4096, least=1))
    m.key("embedding_length", c.integer("hidden_size", least=1))
    m.key("feed_forward_length", c.integer("intermediate_size", least=1))
    n_head, n_kv = _plamo_heads(m)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", n_kv)
    rope(m)
    rms_eps(m, 1e-6)
    for key in ("vocab_size", "num_key_value_heads"):  # the latter counts query heads
        c.given(key)


REFACT: Table = {
    "wte": "token_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.ln_1": "blk.*.attn_norm",
    "h.*.ln_2": "blk.*.ffn_norm",
    "h.*.attn.q": "blk.*.attn_q",
    "h.*.attn.k": "blk.*.attn_k",
    "h.*.attn.v": "blk.*.attn_v",
    "h.*.attn.kv": split("blk.*.attn_k", "blk.*.attn_v"),
    "h.*.attn.c_proj": "blk.*.attn_output",
    "h.*.mlp.linear_1": "blk.*.ffn_gate",
    "h.*.mlp.linear_3": "blk.*.ffn_up",
    "h.*.mlp.gate_up_proj": split("blk.*.ffn_gate", "blk.*.ffn_up"),
    "h.*.mlp.c_proj": "blk.*.ffn_down",
}


def _refact(m: Build) -> None:
    """Norms are around the mean. Other programs know the root of the mean square only, and have its key."""
    c = m.config
    inner = c.integer("n_inner", default=4 * c.integer("hidden_size", "n_embd"))
    old_sizes(m, -(-(2 * inner // 3) // 256) * 256, 1)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", default=1e-5))
    layer_eps(m, 1e-5)
    c.expect("multi_query", True)
    c.ignore("attention_bias_in_fp32", "activation_function", "scale_attn_weights")
    m.notes.append("norms of Refact are around the mean; other programs leave the mean where it is")


ARCHITECTURES = (
    Architecture("dbrx", ("DbrxForCausalLM",), _dbrx, DBRX, tied, strip=_TRANSFORMER),
    Architecture(
        "arctic", ("ArcticForCausalLM",), _arctic, ARCTIC, tied, "",
        frozenset({
            "moe_train_capacity_factor", "moe_eval_capacity_factor", "enable_expert_tensor_parallelism",
            "moe_min_capacity", "moe_token_dropping", "quantization", "use_residual",
        }),
    ),
    Architecture(
        "grok", ("GrokForCausalLM", "Grok1ModelForCausalLM"), _grok, GROK, lambda m: tied(m, True), strip=_TRANSFORMER
    ),
    Architecture("codeshell", ("CodeShellForCausalLM",), _codeshell, CODESHELL, _own_output, strip=_TRANSFORMER),
    Architecture("plamo", ("PlamoForCausalLM",), _plamo, PLAMO, tied),
    Architecture("refact", ("GPTRefactForCausalLM",), _refact, REFACT, _own_output, strip=_TRANSFORMER),
)  # fmt: skip
