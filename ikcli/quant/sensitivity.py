"""How much a relative error of each weight matrix hurts: estimates of KL divergence per squared relative error.

Small errors of different matrices add up, so the damage of a model is the sum over its tensors of sensitivity times
squared relative (importance-weighted) error. A matrix inside a branch counts with the share that the branch has in the
residual stream where it joins it: energy of the output of attn_output or ffn_down (from the weights and the mean
squared inputs of an importance matrix) over that of the stream so far, drawn halfway to a typical share, because large
errors in small branches do more harm than small ones promise. Without importance matrix the typical shares stand in.
The factors were fitted to divergences measured tensor by tensor on two small models (dense, and MLA with experts),
where they are right within a factor of about three.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# Sensitivity of whole-model tensors.
OUTPUT, TOKEN_EMBD = 0.6, 0.2
# Kind of tensor -> branch and factor of the branch's share.
_KINDS: tuple[tuple[str, str, float], ...] = (
    ("attn_k_b", "attn", 0.4),
    ("attn_v_b", "attn", 0.3),
    ("attn_kv_a_mqa", "attn", 0.45),
    ("attn_kv_b", "attn", 0.4),
    ("attn_q_a", "attn", 0.07),
    ("attn_q", "attn", 0.35),
    ("attn_k", "attn", 2.0),
    ("attn_v", "attn", 0.5),
    ("attn_output", "attn", 0.25),
    ("ffn_down_exps", "ffn_exps", 0.4),
    ("ffn_gate_exps", "ffn_exps", 0.2),
    ("ffn_up_exps", "ffn_exps", 0.2),
    ("_shexp", "ffn_shexp", 0.08),
    ("ffn_down", "ffn", 0.28),
    ("ffn_", "ffn", 0.35),
)
_TYPICAL_SHARE = {"attn": 0.07, "ffn": 0.45, "ffn_exps": 0.17, "ffn_shexp": 0.24}
_OTHER = 0.1
# These shape the attention pattern, which matters in branches with little output too: their share counts as typical at
# least.
_PATTERN = ("attn_q", "attn_k.", "attn_k_b", "attn_kv_a_mqa")
BRANCH_ENDS = {
    "attn": "attn_output.weight",
    "ffn": "ffn_down.weight",
    "ffn_exps": "ffn_down_exps.weight",
    "ffn_shexp": "ffn_down_shexp.weight",
}


def branch_of(name: str) -> tuple[str, float]:
    """Branch of a tensor and the factor of its kind; ("", sensitivity) for a tensor outside the known branches."""
    for part, branch, factor in _KINDS:
        if part in name:
            return branch, factor
    return "", TOKEN_EMBD if name == "token_embd.weight" else OUTPUT if name == "output.weight" else _OTHER


def sensitivities(
    names: list[str], metadata: Mapping[str, Any], energies: Mapping[str, float], stream: float | None = None
) -> dict[str, float]:
    """Sensitivity by tensor name.

    `energies`: mean squared norm of the output of the branch ends that have importance weights, per input row (of one
    expert, for experts); `stream`: mean squared norm of a row of the token embedding.
    """
    share = shares(names, metadata, energies, stream)
    tied = "output.weight" not in names
    out: dict[str, float] = {}
    for name in names:
        branch, factor = branch_of(name)
        block = re.match(r"blk\.(\d+)\.", name)
        if not branch or block is None:
            out[name] = factor + (OUTPUT if tied and name == "token_embd.weight" else 0.0)
        else:
            typical = _TYPICAL_SHARE[branch]
            found = share.get((int(block[1]), branch), typical)
            if any(p in name for p in _PATTERN):
                out[name] = factor * max(found, typical)
            else:
                out[name] = factor * math.sqrt(found * typical)
    return out


def shares(
    names: list[str], metadata: Mapping[str, Any], energies: Mapping[str, float], stream: float | None
) -> dict[tuple[int, str], float]:
    """Share of the branches' outputs in the residual stream after they joined it, by (block, branch)."""
    if not stream:
        return {}
    arch = metadata.get("general.architecture", "")
    n_used = max(1, int(metadata.get(f"{arch}.expert_used_count", 1) or 1))
    norm = bool(metadata.get(f"{arch}.expert_weights_norm", False))
    scale = float(metadata.get(f"{arch}.expert_weights_scale", 1.0) or 1.0) if norm else 1.0
    n_block = 1 + max((int(n.split(".")[1]) for n in names if re.match(r"blk\.\d+\.", n)), default=-1)
    out: dict[tuple[int, str], float] = {}
    for il in range(n_block):
        for branch, end in BRANCH_ENDS.items():
            name = f"blk.{il}.{end}"
            if name not in names:
                continue
            if name not in energies:
                return out  # from here on the stream is unknown
            energy = energies[name] * (scale * scale / n_used if branch == "ffn_exps" else 1.0)
            stream += energy
            out[il, branch] = energy / stream if stream > 0 else 0.0
    return out
