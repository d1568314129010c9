"""Derive from openPangu's files what its graphs read: float32 taps of convolutions, and rows before all positions.

A learned row has the form of a row of the cache: [not rotated `param_sink_k_pe` | normed `param_sink_kv`].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.graph import power_of_two_parts
from ikcli.graph.ops_rows import walsh
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorLike, TensorSpec, TensorSpecs

ARCH = "openpangu"
_ROWS, _ROTATED = "attn_param_sink", "attn_param_sink_hadamard"
_CONVS = ("attn_qa_conv.weight", "attn_compresskv_conv.weight", "attn_o_conv.weight")


def specs(hp: HParams) -> TensorSpecs:
    """Return the tensors of a block that its learned rows are made of."""
    return {
        "attn_param_sink_kv": TensorSpec((hp.kv_lora_rank, hp.n_sink)),
        "attn_param_sink_k_pe": TensorSpec((hp.n_rot, hp.n_sink)),
    }


def name(cfg: GraphConfig) -> str:
    """Return the name in a block of its learned rows: with -khad they are transformed as rows of the cache are."""
    return _ROTATED if cfg.k_hadamard else _ROWS


def hadamard_blocks(hp: HParams) -> tuple[int, ...]:
    """Return the blocks of columns that -khad transforms."""
    return (*power_of_two_parts(hp.n_rot), *power_of_two_parts(hp.kv_lora_rank))


def derived_shapes(tensors: Mapping[str, TensorLike], hp: HParams, cfg: GraphConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the float32 tensors that `make` returns."""
    found: dict[str, tuple[int, ...]] = {}
    for il in range(hp.n_layer):
        found[f"blk.{il}.{name(cfg)}"] = (hp.kv_row, hp.n_sink)
        for conv in (f"blk.{il}.{x}" for x in _CONVS):
            if conv in tensors and tensors[conv].type is not GGMLType.F32:
                found[conv] = tuple(tensors[conv].shape)
    return found


def source_of(derived: str) -> str | None:
    """Return the tensor of the file of which a tensor of `derived_shapes` is made; None: it is none of them."""
    block, _, part = derived.rpartition(".")
    if derived.endswith(_CONVS):
        return derived
    return f"{block}.attn_param_sink_kv" if part in (_ROWS, _ROTATED) else None


def make(values: Callable[[str], npt.NDArray[np.float32]], hp: HParams, derived: str) -> npt.NDArray[np.float32]:
    """Return a tensor of `derived_shapes`; `values` returns one of the file."""
    if derived.endswith(_CONVS):
        return np.ascontiguousarray(values(derived), np.float32)
    block, _, part = derived.rpartition(".")
    latent = values(f"{block}.attn_param_sink_kv").astype(np.float64)
    latent /= np.sqrt(np.mean(latent * latent, axis=1, keepdims=True) + hp.eps)
    latent *= values(f"{block}.attn_kv_a_norm.weight")
    rows = np.concatenate([values(f"{block}.attn_param_sink_k_pe"), latent], axis=1)
    at = 0
    for size in hadamard_blocks(hp) if part == _ROTATED else ():
        rows[:, at : at + size] = rows[:, at : at + size] @ walsh(size)
        at += size
    return np.ascontiguousarray(rows, np.float32)
