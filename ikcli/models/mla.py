"""Derive tensors that a graph needs and the file lacks: of multi-head latent attention, for a mode; of others, always.

kv_b has n_head * (nope + v) rows of `rank` values: per head the rows of k_nope, then those of v. k_b is, per head,
k_nope transposed (`rank` rows of nope values); v_b is the v rows. Types: k_b keeps a float type and is q8_0 otherwise;
v_b is a copy of kv_b's rows, bytes untouched; kv_b keeps a float type that both parts share and is q8_0 otherwise.
Corresponds to `llm_prepare_mla` of ik_llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.sparse import sink_rows, taps
from ikcli.models.tensors import TensorLike
from ikcli.models.traits import MLA
from ikcli.quant.decode import dequantize
from ikcli.quant.encode import quantize


class TensorFile(Protocol):
    """A file of tensors."""

    @property
    def tensors(self) -> Mapping[str, TensorLike]: ...

    def data(self, name: str) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True)
class DerivedSpec:
    """Type and shape of a tensor that is made at load time."""

    type: GGMLType
    shape: tuple[int, ...]


def derived_specs(tensors: Mapping[str, TensorLike], hp: HParams, cfg: GraphConfig) -> dict[str, DerivedSpec]:
    """Return what `derive` will make, without reading data; raise FormatError if a layer has neither form."""
    specs: dict[str, DerivedSpec] = {}
    if hp.arch == taps.ARCH:
        return {name: DerivedSpec(GGMLType.F32, shape) for name, shape in taps.derived_shapes(hp).items()}
    if hp.arch not in MLA:
        return specs
    if hp.arch == sink_rows.ARCH:  # always absorbed
        cfg = replace(cfg, mla=1)
        shapes = sink_rows.derived_shapes(tensors, hp, cfg)
        specs |= {name: DerivedSpec(GGMLType.F32, shape) for name, shape in shapes.items()}
    model = hp
    for il in (il for il in range(hp.n_layer) if not hp.is_recurrent(il)):
        hp = model.at(il)
        nope, dv = hp.head_dim_k - hp.n_rot, hp.head_dim_v
        expands = cfg.mla == 0 or (cfg.mla > 1 and cfg.flash_attn and not hp.window)
        kv_b, k_b, v_b = (tensors.get(_name(il, part)) for part in ("kv_b", "k_b", "v_b"))
        if kv_b is None and (k_b is None or v_b is None):
            raise FormatError(
                f"{hp.source}: block {il} has neither '{_name(il, 'kv_b')}' nor both '{_name(il, 'k_b')}' and "
                f"'{_name(il, 'v_b')}'; the file is incomplete"
            )
        if kv_b is None and k_b is not None and v_b is not None and expands:
            same = _plain(k_b.type) == _plain(v_b.type) and TYPES[k_b.type].kind == "float"
            type_ = _plain(k_b.type) if same else GGMLType.Q8_0
            specs[_name(il, "kv_b")] = DerivedSpec(type_, (hp.kv_lora_rank, hp.n_head * (nope + dv)))
        if kv_b is not None and cfg.mla > 0:
            if k_b is None:
                type_ = _plain(kv_b.type) if TYPES[kv_b.type].kind == "float" else GGMLType.Q8_0
                specs[_name(il, "k_b")] = DerivedSpec(type_, (nope, hp.kv_lora_rank, hp.n_head))
            if v_b is None:
                specs[_name(il, "v_b")] = DerivedSpec(kv_b.type, (hp.kv_lora_rank, dv, hp.n_head))
        parts = [_name(il, part) for part in ("kv_b", "k_b", "v_b")]
        made = next((name for name in parts if name in specs), None)
        scaled = next((name for name in parts if name.replace(".weight", ".scale") in tensors), None)
        if made is not None and scaled is not None:
            raise UnsupportedError(
                f"{hp.source}: '{made}' is made of tensors of which '{scaled}' has a factor beside it; convert the "
                "checkpoint with `ik convert`, which multiplies such factors into the values"
            )
    return specs


def derive(
    file: TensorFile, hp: HParams, cfg: GraphConfig
) -> dict[str, tuple[GGMLType, tuple[int, ...], npt.NDArray[np.uint8]]]:
    """Return type, shape (GGUF order) and bytes of every missing tensor that `cfg` needs."""
    specs = derived_specs(file.tensors, hp, cfg)
    return {name: (s.type, s.shape, derive_one(file, hp, name, s)) for name, s in specs.items()}


def derive_one(file: TensorFile, hp: HParams, name: str, spec: DerivedSpec) -> npt.NDArray[np.uint8]:
    """Return the bytes of one derived tensor; temporaries are a few times one layer's projection in float32."""
    if taps.source_of(name) is not None:
        return taps.make(lambda x: _values(file, x), hp, name).reshape(-1).view(np.uint8)
    if sink_rows.source_of(name) is not None:
        return sink_rows.make(lambda x: _values(file, x), hp, name).reshape(-1).view(np.uint8)
    il = int(name.split(".")[1])
    hp = hp.at(il)
    part = name.split(".")[2].removeprefix("attn_")
    if part == "v_b":
        return _value_rows(file, hp, _name(il, "kv_b"))
    nope, dv, rank = hp.head_dim_k - hp.n_rot, hp.head_dim_v, hp.kv_lora_rank
    if part == "k_b":
        kv = _values(file, _name(il, "kv_b")).reshape(hp.n_head, nope + dv, rank)
        return quantize(np.ascontiguousarray(kv[:, :nope].transpose(0, 2, 1)), spec.type)
    k = _values(file, _name(il, "k_b")).reshape(hp.n_head, rank, nope).transpose(0, 2, 1)
    v = _values(file, _name(il, "v_b")).reshape(hp.n_head, dv, rank)
    return quantize(np.concatenate([k, v], axis=1), spec.type)


def source_of(derived: str) -> str:
    """Return the tensor of the file that a derived one is made of."""
    block, _, part = derived.rpartition(".attn_")
    other = "k_b" if part == "kv_b.weight" else "kv_b"
    return taps.source_of(derived) or sink_rows.source_of(derived) or f"{block}.attn_{other}.weight"


def _name(il: int, part: str) -> str:
    return f"blk.{il}.attn_{part}.weight"


def _plain(type_: GGMLType) -> GGMLType:
    """Return the plain twin of an interleaved type, or the type itself."""
    return TYPES[type_].plain


def _values(file: TensorFile, name: str) -> npt.NDArray[np.float32]:
    t = file.tensors[name]
    return dequantize(file.data(name), t.type, tuple(t.shape))


def _value_rows(file: TensorFile, hp: HParams, name: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of the v rows of every head of kv_b."""
    t = file.tensors[name]
    nope, dv = hp.head_dim_k - hp.n_rot, hp.head_dim_v
    group = TYPES[t.type].rows
    if nope % group or dv % group or TYPES[t.type].tensor_meta_size:
        raise UnsupportedError(
            f"{hp.source}: tensor '{name}' of type {TYPES[t.type].name} cannot be divided by heads; use -mla 0"
        )
    rows = file.data(name).reshape(hp.n_head, nope + dv, row_n_bytes(t.type, t.shape[0]))
    return np.ascontiguousarray(rows[:, nope:]).reshape(-1)
