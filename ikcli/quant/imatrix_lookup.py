"""Find weight matrices that share an input, and weights for experts that the text reached rarely or not at all.

An expert with `count` rows gets own * (1 - w) + layer * w, w = DRAW / (count + DRAW), where `layer` is the mean of the
tensor's experts weighted by their rows. This is the least-error estimate if the mean square of a column, taken from one
row, varies DRAW times as much as the columns of experts vary around those of their layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
DRAW = 32.0  # rows that the mean of the layer counts as; 1000 rows of an expert leave it 3 %

# Tensor of a block -> others with the same input, in order of preference; as the reference looks them up.
_AS_THE_REFERENCE = {
    "ffn_up_exps": ("ffn_gate_up_exps",),
    "ffn_gate_exps": ("ffn_gate_up_exps", "ffn_up_exps"),
    "ffn_gate_up_exps": ("ffn_up_exps",),
    "ffn_gate": ("ffn_up",),
    "attn_v_b": ("attn_kv_b",),
    "attn_kv_b": ("attn_v_b",),
}
# More of them: products that the graphs of `ikcli.models` feed with one node, and what fusing makes of these.
_ATTENTION = ("attn_qkv", "attn_qk", "attn_q", "attn_k", "attn_v", "attn_q_a", "attn_kv_a_mqa", "attn_gate",
              "attn_indexer_k", "attn_indexer_weights_proj", "ssm_in", "ssm_ba", "ssm_alpha", "ssm_beta", "ssm_f_a",
              "ssm_g", "ssm_g_a", "laurel_l")  # fmt: skip
_SHARED = ("ffn_gate_up_shexp", "ffn_up_shexp", "ffn_gate_shexp", "ffn_gate_inp", "ffn_gate_inp_shexp",
           "ffn_routed_down")  # fmt: skip
_MORE = {
    **{part: tuple(p for p in group if p != part) for group in (_ATTENTION, _SHARED) for part in group},
    "attn_q_b": ("attn_indexer_q_b",),
    "attn_indexer_q_b": ("attn_q_b",),
    "ffn_up": ("ffn_gate_up", "ffn_gate"),
    "ffn_gate": ("ffn_gate_up",),
    "ffn_gate_up": ("ffn_up", "ffn_gate"),
    "ffn_up_exps": ("ffn_gate_exps",),
    "ffn_gate_up_exps": ("ffn_gate_exps",),
    "ffn_up_chexps": ("ffn_gate_chexps",),
    "ffn_gate_chexps": ("ffn_up_chexps",),
}
"""Which is symmetric with `_AS_THE_REFERENCE`: what serves one tensor of a group is served by it."""
_EXPERTS = re.compile(r"exps\.weight$")


def relatives(name: str) -> tuple[str, ...]:
    """Return the tensors that have the same input, in order of preference."""
    return (*reference_relatives(name), *_look_up(name, _MORE))


def reference_relatives(name: str) -> tuple[str, ...]:
    """Return those `relatives` that the reference looks up too."""
    return _look_up(name, _AS_THE_REFERENCE)


def _look_up(name: str, table: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    stem, dot, part = name.removesuffix(".weight").rpartition(".")
    return tuple(f"{stem}{dot}{other}.weight" for other in table.get(part, ())) if name.endswith(".weight") else ()


def count_experts(name: str, sizes: Mapping[str, int]) -> int:
    """Infer the number of experts of a tensor from the sizes of all entries; 1 if it has none or they do not tell."""
    if not is_experts(name):
        return 1
    block = name.removesuffix(".weight").rpartition(".")[0]

    def first(parts: Iterable[str]) -> int:
        return next((sizes[n] for n in (f"{block}.{part}.weight" for part in parts) if n in sizes), 0)

    inputs, n_embd = first(("ffn_up_exps", "ffn_gate_exps", "ffn_gate_up_exps")), first((*_SHARED, *_ATTENTION))
    n = inputs // n_embd if n_embd and inputs % n_embd == 0 else 0
    return n if n and sizes.get(name, 0) % n == 0 else 1


def is_experts(name: str) -> bool:
    """Return whether a tensor holds one matrix per routed expert."""
    return _EXPERTS.search(name) is not None


def without_data(sums: Floats, counts: Floats, n_mat: int) -> npt.NDArray[np.bool_]:
    """Return for every matrix whether it saw no row, (n_mat,).

    Where all matrices share one count (`.dat` files), a matrix whose columns are all equal counts as one without data:
    programs write 1 there, or leave the sums at 0, while measured columns differ.
    """
    if len(counts) == n_mat:
        return np.asarray(counts <= 0)
    rows = sums.reshape(n_mat, -1)
    flat = np.asarray(rows.max(axis=1) == rows.min(axis=1))
    return flat if rows.shape[1] > 1 and not flat.all() else np.zeros(n_mat, bool)


def layer_share(counts: Floats) -> Floats:
    """Return the share 0..1 that the mean of the layer contributes to matrices with these row counts."""
    return np.asarray(DRAW / (np.maximum(counts, 0) + DRAW), np.float32)


def layer_mean(sums: Floats, counts: Floats, n_mat: int) -> Floats:
    """Return the mean squares (ne0,) of all matrices with data, weighted by known row counts; 1 without any data."""
    rows, empty = sums.reshape(n_mat, -1), without_data(sums, counts, n_mat)
    if empty.all():
        return np.ones(rows.shape[1], np.float32)
    n_rows = counts.sum(where=~empty, dtype=np.float64) if len(counts) == n_mat else float(counts[0]) * (~empty).sum()
    return (rows[~empty].sum(axis=0, dtype=np.float64) / n_rows).astype(np.float32)


def expert_weights(sums: Floats, counts: Floats, n_mat: int) -> Floats:
    """Return weights (n_mat, ne0) of experts, drawn towards the mean of their layer.

    Where one count stands for all experts, the experts with few rows are unknown; only those without data change.
    """
    rows, empty = sums.reshape(n_mat, -1), without_data(sums, counts, n_mat)
    mean = layer_mean(sums, counts, n_mat)
    own = rows / np.where(counts > 0, counts, np.float32(1))[:, None]
    share = layer_share(counts) if len(counts) == n_mat else np.float32(0)
    share = np.where(empty, np.float32(1), share)[:, None]
    return np.asarray(own * (1 - share) + mean * share, np.float32)
