"""Arctic: a dense part beside the experts."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.llama import llama_keys


def _arctic(m: b.Build) -> None:
    c = m.config
    llama_keys(m)
    k.experts(m, "num_local_experts", width=False)
    k.no_window(m)
    if c.integer("moe_layer_frequency", default=2) != 1:
        raise c.fail("moe_layer_frequency", "should be 1: experts in every layer")
    if not c.flag("parallel_attn_mlp_res"):
        raise c.fail("parallel_attn_mlp_res", "should be true: a dense part beside the experts")


ARCHITECTURES = (
    b.Architecture(
        "arctic", ("ArcticForCausalLM",), _arctic, b.PAIRS, k.tied, "",
        frozenset({
            "moe_train_capacity_factor", "moe_eval_capacity_factor", "enable_expert_tensor_parallelism",
            "moe_min_capacity", "moe_token_dropping", "quantization", "use_residual",
        }),
    ),
)  # fmt: skip
