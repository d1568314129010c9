"""ERNIE 4.5, dense and with experts, and the text of PaddleOCR-VL."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.qwen import sections

ERNIE_MOE: b.Table = {
    "layers.*.mlp.moe_statics.e_score_correction.bias": lambda m, t: m.plain(
        t, f"blk.{t.block}.exp_probs_b.bias", (t.shape[-1],)
    ),
}  # fmt: skip


def _erniemoe(m: b.Build) -> None:
    c = m.config
    k.plain(m)
    m.key("expert_count", c.integer("moe_num_experts", least=1))
    m.key("expert_used_count", c.integer("moe_k", least=1))
    m.key("interleave_moe_layer_step", c.integer("moe_layer_interval", default=1, least=1))
    m.key("leading_dense_block_count", c.integer("moe_layer_start_index", default=0))
    m.key("expert_feed_forward_length", c.integer("moe_intermediate_size", least=1))
    n_shared = c.integer("moe_num_shared_experts", default=0)
    if n_shared:
        m.key("expert_shared_count", n_shared)
        m.key("expert_shared_feed_forward_length", n_shared * c.integer("moe_intermediate_size"))
    end = c.given("moe_layer_end_index")
    if end not in (None, -1, m.n_layer - 1):
        raise c.refuse("moe_layer_end_index", f"{m.n_layer - 1}")
    c.ignore("moe_norm_min", "moe_capacity")
    c.expect("moe_use_aux_free", True)
    c.expect("moe_gate", "topk", "top2_fused")


def _paddleocr(m: b.Build) -> None:
    k.plain(m)
    sections(m)


ARCHITECTURES = (
    b.Architecture("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), k.plain, finish=k.tied),
    b.Architecture("paddleocr", ("PaddleOCRVLForConditionalGeneration",), _paddleocr, {}, k.tied,
                   r"(^|\.)visual\.|mlp_AR\.|(^|\.)projector\."),
    b.Architecture(
        "ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",), _erniemoe, ERNIE_MOE, k.tied, r"mtp_",
        frozenset({"use_rmsnorm", "fuse_rms_norm"}),
    ),
)  # fmt: skip
