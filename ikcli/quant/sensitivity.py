"""Estimate, without running the model, how much a relative error of each weight matrix hurts.

The unit is the squared relative error of the logits; small errors of different matrices add up. The output matrix makes
the logits, so its own error counts fully. So does that of the token embedding, which is the first residual stream. A
matrix inside a branch (attention, feed-forward) counts with the share that the branch has in the energy of the stream
right after joining it, because blocks normalise the stream and so pass relative errors on. Energies come from the
weights and the mean squared inputs of an importance matrix; without one, all branches count as equally strong. The few
constants are the same for all models; their round values were checked on two small ones only. Measured sensitivities
(`calibration`) replace these estimates on request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# Squared relative error of the logits -> KL divergence: half the variance of log-probabilities, which is about 1.
KLD_PER_ERROR = 0.5
BRANCH_ENDS = {
    "attn": "attn_output.weight",
    "ffn": "ffn_down.weight",
    "ffn_exps": "ffn_down_exps.weight",
    "ffn_shexp": "ffn_down_shexp.weight",
}
# Soft-max ignores what the keys of all positions have in common, and trained keys have much in common: the same
# relative error of K weighs more against what is left.
_KEYS = ("attn_k.", "attn_k_b", "attn_kv_a_mqa")
KEY_FACTOR = 2.0
# Mean squared attention score: an error of Q or K moves scores, and with them the output, by so much more than its
# relative size. Beyond these limits soft-max hardly follows, or the estimate from independent columns is too rough.
_SCORE_LIMITS = (0.5, 4.0)
QUERY, KEY = "attn_q.weight", "attn_k.weight"


def branch_of(name: str) -> str:
    """Return the branch of a tensor of a block; empty for other tensors."""
    if not name.startswith("blk."):
        return ""
    if "_exps" in name:
        return "ffn_exps"
    if "_shexp" in name:
        return "ffn_shexp"
    return "attn" if ".attn_" in name else "ffn"


def sensitivities(
    names: list[str], metadata: Mapping[str, Any], energies: Mapping[str, float], stream: float | None = None
) -> dict[str, float]:
    """Estimate the KL divergence per squared relative error, by tensor name.

    `energies`: mean squared norm of the output of the branch ends that have importance weights, per input row (of one
    expert, for experts), and mean squared element of the output of Q and K. `stream`: mean squared norm of a row of the
    token embedding.
    """
    share = shares(names, metadata, energies, stream)
    tied = "output.weight" not in names
    out: dict[str, float] = {}
    for name in names:
        branch, block = branch_of(name), re.match(r"blk\.(\d+)\.", name)
        factor = 1.0
        if branch and block is not None:
            factor = share.get((int(block[1]), branch), 0.5)
            if name.endswith((QUERY, KEY)):
                factor *= _score(block[0], names, energies)
            if any(part in name for part in _KEYS):
                factor *= KEY_FACTOR
        elif tied and name == "token_embd.weight":
            factor = 2.0
        out[name] = KLD_PER_ERROR * factor
    return out


def _score(block: str, names: list[str], energies: Mapping[str, float]) -> float:
    """Return the mean squared attention score of a block (`blk.N.`), 1 where it is unknown.

    It is the product of the mean squared elements of Q and K, within `_SCORE_LIMITS`.
    """
    q, k = energies.get(block + QUERY), energies.get(block + KEY)
    if q is None or k is None or block + "attn_q_norm.weight" in names:
        return 1.0
    return min(max(q * k, _SCORE_LIMITS[0]), _SCORE_LIMITS[1])


def shares(
    names: list[str], metadata: Mapping[str, Any], energies: Mapping[str, float], stream: float | None
) -> dict[tuple[int, str], float]:
    """Return the share of every branch in the residual stream right after it joined, by (block, branch).

    A branch without energy counts as strong as the mean of those that have one, or as the embedding if none has.
    """
    ends = tuple(BRANCH_ENDS.values())
    known = [energies[n] * _mixed(n, metadata) for n in names if n in energies and n.endswith(ends)]
    usual = sum(known) / len(known) if known else 1.0
    total = stream if stream and known else usual
    n_block = 1 + max((int(n.split(".")[1]) for n in names if re.match(r"blk\.\d+\.", n)), default=-1)
    present = set(names)
    out: dict[tuple[int, str], float] = {}
    for il in range(n_block):
        for branch, end in BRANCH_ENDS.items():
            name = f"blk.{il}.{end}"
            if name in present:
                energy = energies[name] * _mixed(name, metadata) if name in energies else usual
                total += energy
                out[il, branch] = energy / total if total > 0 else 0.0
    return out


def _mixed(name: str, metadata: Mapping[str, Any]) -> float:
    """Return the sum of the squared router weights that mix the outputs of experts; 1 for other branches.

    Router weights that are not normalised add up to something between n_used/n_expert and 1; the geometric mean of the
    two is used.
    """
    if branch_of(name) != "ffn_exps":
        return 1.0
    arch = metadata.get("general.architecture", "")
    n_used = max(1, int(metadata.get(f"{arch}.expert_used_count", 1) or 1))
    n_expert = max(n_used, int(metadata.get(f"{arch}.expert_count", n_used) or n_used))
    total = float(metadata.get(f"{arch}.expert_weights_scale", 1.0) or 1.0)
    if not metadata.get(f"{arch}.expert_weights_norm", arch not in ("deepseek2",)):
        total *= math.sqrt(n_used / n_expert)
    return total * total / n_used
