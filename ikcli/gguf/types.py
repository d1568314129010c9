"""The table of tensor types: one record each (`type_record.py`), by family.

A row of `ne0` elements takes `row_meta_size + type_size * ne0 / block_size` bytes; rows follow without padding.
Only I2_S has no row structure: `ne/4` bytes for the whole tensor, then 32 bytes that hold one scale.
Corresponds to `type_traits[]` and `interleaved_properties` of ik_llama.cpp. In interleaved types (`_R4`, `_R8`, `_R16`)
the sizes are the share of one row; the physical unit is R rows at once.

A family tells where the functions of its types are; a record has its own settings, else those of its family.
`pair` makes two records: of a type and of its interleaved twin.

For a type of another package, `new_type_id` makes its number and `add_type` enters its record.
"""

from __future__ import annotations

from ikcli.gguf.constants import GGMLType, new_type_id
from ikcli.gguf.type_record import TensorType, TypeFamily, interleaved

__all__ = ["TYPES", "TensorType", "add_type", "new_type_id", "row_n_bytes", "tensor_n_bytes"]

T = GGMLType
_KERNELS = "ikcli.backends.cpu.kernels"

_FLOATS = TypeFamily("floats", "floats:encode", codes=False, facts={"kind": "float", "standard": True})
_BLOCKS = TypeFamily("legacy", "legacy:encode", "formats_legacy", "formats_r4", facts={"standard": True})
_K = TypeFamily("kquants", "kquants:encode", "formats_kquants", "formats_r4", facts={"standard": True})
_GRIDS = TypeFamily("iquants", "iquants:encode", "formats_iquants", "formats_r4_grid",
                facts={"standard": True, "fallback": T.IQ4_NL})  # fmt: skip
_GRIDS_R4 = TypeFamily("interleaved", "iquants:encode", codes=False,
                   facts={"rows": 4, "row_meta_size": 2, "grid": "IQ1_S", "needs_imatrix": True})  # fmt: skip
_IQK = TypeFamily("iqk", "iqk:encode", "formats_iqk", "formats_r4_iqk", facts={"candidate": "all"})
_TRELLIS = TypeFamily("trellis", "trellis:encode", "formats_trellis",
                  facts={"row_meta_size": 4, "tile": "s32", "fallback": T.IQ4_NL})  # fmt: skip
_TERNARY = TypeFamily("bitnet", "bitnet:encode", "formats_trellis", "formats_r4_iqk", codes=False,
                  facts={"kind": "ternary", "tile": "s32", "keeps_length": ""})  # fmt: skip
_LOW_BITS = TypeFamily("mainline", "", "formats_mainline", codes=False,
                   facts={"tile": "s32", "standard": True, "encode": ""})  # fmt: skip
_BYTES = TypeFamily("bitnet", "int8:encode_rows", "formats_legacy", facts={"tile": "s32", "keeps_length": ""})
_BYTES_R = TypeFamily("interleaved", "int8:encode_groups", codes=False,
                  facts={"tile": "s32", "keeps_length": "", "scales": (0,), "stand_in": T.Q8_0, "fallback": T.Q8_0,
                         "cpu": f"{_KERNELS}.formats_r4:Q8_K", "cuda": ((2, 256), (0, 2)),
                         "cuda_name": "q8_K"})  # fmt: skip

_BF16 = _FLOATS.type(T.BF16, "bf16", 1, 2, encode_numpy="ikcli.quant.encode:bf16", cuda=((0, 2),))
_Q8_KV = _BYTES.type(T.Q8_KV, "q8_KV", 32, 32, row_meta_size=8, cuda=((0, 32),))
_RECORDS: tuple[TensorType, ...] = (
    # --- numbers ------------------------------------------------------------------------------------------------------
    _FLOATS.type(T.F32, "f32", 1, 4, encode="", encode_numpy="ikcli.quant.encode:f32", cuda=((0, 4),)),
    _FLOATS.type(T.F16, "f16", 1, 2, encode_numpy="ikcli.quant.encode:f16", cuda=((0, 2),)),
    _BF16,
    interleaved(_BF16, T.BF16_R16, ""),
    TensorType(T.F64, "f64", 1, 8, kind="double", standard=True),
    *(TensorType(t, t.name.lower(), 1, n, kind="integer", standard=True)
      for t, n in ((T.I8, 1), (T.I16, 2), (T.I32, 4), (T.I64, 8))),
    # --- blocks of 32: a scale, in the _1 types a minimum, codes ------------------------------------------------------
    *_BLOCKS.pair(T.Q4_0, T.Q4_0_R8, "q4_0", 32, 18, tile="s32", scales=(0,), cuda=((2, 16), (0, 2)),
                  keeps_length="weighted", encode_numpy="ikcli.quant.encode:q4_0"),
    _BLOCKS.type(T.Q4_1, "q4_1", 32, 20, tile="m32", scales=(0, 2), cuda=((4, 16), (0, 4)), keeps_length="weighted"),
    *_BLOCKS.pair(T.Q5_0, T.Q5_0_R4, "q5_0", 32, 22, tile="s32", scales=(0,), cuda=((6, 16), (2, 4), (0, 2)),
                  keeps_length="weighted", candidate="all"),
    _BLOCKS.type(T.Q5_1, "q5_1", 32, 24, tile="m32", scales=(0, 2), cuda=((8, 16), (4, 4), (0, 4)),
                 keeps_length="weighted"),
    *_BLOCKS.pair(T.Q6_0, T.Q6_0_R4, "q6_0", 32, 26, tile="s32", scales=(0,), cuda=((10, 16), (2, 8), (0, 2)),
                  standard=False, candidate="all"),
    *_BLOCKS.pair(T.Q8_0, T.Q8_0_R8, "q8_0", 32, 34, tile="s32", scales=(0,), cuda=((2, 32), (0, 2)), keeps_length="",
                  encode_numpy="ikcli.quant.encode:q8_0", candidate="all"),
    *_BLOCKS.pair(T.IQ4_NL, T.IQ4_NL_R4, "iq4_nl", 32, 18, tile="s32", scales=(0,), cuda=((2, 16), (0, 2)),
                  candidate="all"),
    *_BLOCKS.pair(T.MXFP4, T.MXFP4_R8, "mxfp4", 32, 17, tile="s32", cuda=((1, 16), (0, 1)), keeps_length="",
                  decode="ikcli.quant.decoders.iquants:mxfp4"),
    _LOW_BITS.type(T.Q1_0_G128, "q1_0_g128", 128, 18, scales=(0,), cuda=((2, 16), (0, 2))),
    _LOW_BITS.type(T.Q2_0, "q2_0", 64, 18, scales=(0,), cuda=((2, 16), (0, 2))),
    _LOW_BITS.type(T.NVFP4, "nvfp4", 64, 36, tile="s16", cuda=((4, 32), (0, 4)), keeps_length="",
                   encode="ikcli.quant.encoders.nvfp4:encode", codes="ikcli.quant.code_fields:nvfp4"),
    *(TensorType(t, name, 32, 18, rows=rows, scales=(0,), stand_in=T.Q4_0)  # retired
      for t, name, rows in ((T.Q4_0_4_4, "q4_0_4x4", 4), (T.Q4_0_4_8, "q4_0_4x8", 4), (T.Q4_0_8_8, "q4_0_8x8", 8))),
    # --- super-blocks of 256 with packed scales of sub-blocks ---------------------------------------------------------
    *_K.pair(T.Q2_K, T.Q2_K_R4, "q2_K", 256, 84, tile="m16", scales=(80, 82), cuda=((16, 64), (0, 16), (80, 4)),
             fallback=T.IQ4_NL),
    *_K.pair(T.Q3_K, T.Q3_K_R4, "q3_K", 256, 110, tile="s16", scales=(108,),
             cuda=((32, 64), (0, 32), (96, 12), (108, 2)), fallback=T.IQ4_NL),
    *_K.pair(T.Q4_K, T.Q4_K_R4, "q4_K", 256, 144, tile="m32", scales=(0, 2), cuda=((16, 128), (0, 16)),
             fallback=T.Q5_0),
    *_K.pair(T.Q5_K, T.Q5_K_R4, "q5_K", 256, 176, tile="m32", scales=(0, 2), cuda=((48, 128), (16, 32), (0, 16)),
             fallback=T.Q6_0),
    *_K.pair(T.Q6_K, T.Q6_K_R4, "q6_K", 256, 210, tile="s16", scales=(208,),
             cuda=((0, 128), (128, 64), (192, 16), (208, 2)), fallback=T.Q8_0, candidate="all"),
    *_K.pair(T.IQ4_XS, T.IQ4_XS_R8, "iq4_xs", 256, 136, tile="s32", scales=(0,), cuda=((8, 128), (0, 8)),
             fallback=T.IQ4_NL, candidate="all", decode="ikcli.quant.decoders.iquants:iq4_xs"),
    # --- points of a grid of 8 or 4 values, separate signs ------------------------------------------------------------
    *_GRIDS.pair(T.IQ2_XXS, T.IQ2_XXS_R4, "iq2_xxs", 256, 66, tile="s32", scales=(0,), grid="IQ2_XXS",
                 cuda=((2, 64), (0, 2)), needs_imatrix=True, candidate="all"),
    *_GRIDS.pair(T.IQ2_XS, T.IQ2_XS_R4, "iq2_xs", 256, 74, tile="s16", scales=(0,), grid="IQ2_XS",
                 cuda=((2, 64), (66, 8), (0, 2)), needs_imatrix=True),
    *_GRIDS.pair(T.IQ2_S, T.IQ2_S_R4, "iq2_s", 256, 82, tile="s16", scales=(0,), grid="IQ2_S",
                 cuda=((2, 32), (34, 32), (66, 8), (74, 8), (0, 2)), needs_imatrix=True, candidate="all"),
    *_GRIDS.pair(T.IQ3_XXS, T.IQ3_XXS_R4, "iq3_xxs", 256, 98, tile="s32", scales=(0,), grid="IQ3_XXS",
                 cuda=((2, 64), (66, 32), (0, 2)), candidate="all"),
    *_GRIDS.pair(T.IQ3_S, T.IQ3_S_R4, "iq3_s", 256, 110, tile="s32", scales=(0,), grid="IQ3_S",
                 cuda=((2, 64), (66, 8), (74, 32), (106, 4), (0, 2)), candidate="all"),
    _GRIDS.type(T.IQ1_S, "iq1_s", 256, 50, tile="s32", scales=(0,), grid="IQ1_S", cuda=((2, 32), (34, 16), (0, 2)),
                needs_imatrix=True),
    _GRIDS.type(T.IQ1_M, "iq1_m", 256, 56, tile="s16", grid="IQ1_S", cuda=((0, 32), (32, 16), (48, 8)),
                needs_imatrix=True, candidate="all"),
    _GRIDS_R4.type(T.IQ1_S_R4, "iq1_s_r4", 32, 6, stand_in=T.IQ1_S, tile="s32",
                   layout="ikcli.quant.interleave:iq1_s_r4", cpu=f"{_KERNELS}.formats_r4_grid:IQ1_S",
                   cuda=((0, 4), (4, 2)), cuda_name="iq1_s_r"),
    _GRIDS_R4.type(T.IQ1_M_R4, "iq1_m_r4", 32, 7, stand_in=T.IQ1_M, tile="s16",
                   layout="ikcli.quant.interleave:iq1_m_r4", cpu=f"{_KERNELS}.formats_r4_grid:IQ1_M",
                   cuda=((0, 4), (4, 2), (6, 1)), cuda_name="iq1_m_r"),
    # --- entries of a nonlinear table, one of two for each sub-block; KS, KSS, KL: a scale per row --------------------
    *_IQK.pair(T.IQ2_K, T.IQ2_K_R4, "iq2_k", 256, 76, tile="s16", scales=(0,), cuda=((12, 64), (4, 8), (0, 4)),
               fallback=T.IQ4_NL),
    *_IQK.pair(T.IQ3_K, T.IQ3_K_R4, "iq3_k", 256, 110, tile="s16", scales=(0,),
               cuda=((14, 64), (78, 32), (6, 8), (0, 6)), fallback=T.IQ4_NL),
    *_IQK.pair(T.IQ4_K, T.IQ4_K_R4, "iq4_k", 256, 144, tile="s16", scales=(0,), cuda=((16, 128), (0, 8), (8, 8)),
               fallback=T.Q5_0),
    *_IQK.pair(T.IQ5_K, T.IQ5_K_R4, "iq5_k", 256, 176, tile="s16", scales=(0,),
               cuda=((16, 128), (144, 32), (0, 8), (8, 8)), fallback=T.Q6_0),
    _IQK.type(T.IQ6_K, "iq6_k", 256, 212, tile="s16", scales=(0,), cuda=((20, 128), (148, 64), (4, 16), (0, 4)),
              fallback=T.Q8_0),
    _IQK.type(T.IQ2_KS, "iq2_ks", 256, 70, row_meta_size=2, tile="s32", cuda=((6, 64), (0, 6)), fallback=T.IQ4_NL),
    _IQK.type(T.IQ3_KS, "iq3_ks", 256, 102, row_meta_size=2, tile="s32", cuda=((6, 64), (70, 32), (0, 6)),
              fallback=T.IQ4_NL),
    *_IQK.pair(T.IQ4_KS, T.IQ4_KS_R4, "iq4_ks", 256, 136, row_meta_size=4, tile="s32", cuda=((8, 128), (0, 8)),
               fallback=T.IQ4_NL),
    *_IQK.pair(T.IQ5_KS, T.IQ5_KS_R4, "iq5_ks", 256, 168, row_meta_size=4, tile="s32",
               cuda=((8, 128), (136, 32), (0, 8)), fallback=T.Q5_0),
    _IQK.type(T.IQ4_KSS, "iq4_kss", 256, 128, row_meta_size=4, tile="s32", cuda=((0, 128),), fallback=T.IQ4_NL),
    _IQK.type(T.IQ2_KL, "iq2_kl", 256, 86, row_meta_size=2, tile="s32", cuda=((6, 64), (70, 16), (0, 6)),
              fallback=T.IQ4_NL),
    # --- outputs of a generator, a scale per row ----------------------------------------------------------------------
    _TRELLIS.type(T.IQ1_KT, "iq1_kt", 256, 56, cuda=((8, 32), (40, 16), (0, 8)), needs_imatrix=True),
    _TRELLIS.type(T.IQ2_KT, "iq2_kt", 256, 68, cuda=((4, 64), (0, 4)), matmul_scale=1.05, needs_imatrix=True,
                  candidate="gpu"),
    _TRELLIS.type(T.IQ3_KT, "iq3_kt", 256, 100, cuda=((4, 64), (68, 32), (0, 4)), matmul_scale=1.01, candidate="gpu"),
    _TRELLIS.type(T.IQ4_KT, "iq4_kt", 256, 128, cuda=((32, 64), (96, 32), (0, 32)), candidate="gpu"),
    # --- -1, 0 and 1 times a scale per block --------------------------------------------------------------------------
    _LOW_BITS.type(T.TQ1_0, "tq1_0", 256, 54, scales=(52,), cuda=((0, 48), (48, 4), (52, 2)),
                   encode="ikcli.quant.encoders.ternary:encode",
                   kind="ternary", keeps_length="", fallback=T.IQ4_NL),
    _LOW_BITS.type(T.TQ2_0, "tq2_0", 256, 66, scales=(64,), cuda=((0, 64), (64, 2)),
                   encode="ikcli.quant.encoders.ternary:encode",
                   kind="ternary", keeps_length="", fallback=T.IQ4_NL),
    # --- -1, 0 and 1 times a scale per row ----------------------------------------------------------------------------
    TensorType(T.I2_S, "i2_s", 128, 32, 0, 32, kind="ternary", decode="ikcli.quant.decoders.bitnet:i2_s"),
    _TERNARY.type(T.IQ1_BN, "iq1_bn", 64, 13, row_meta_size=2, cuda=((0, 12), (12, 1))),
    *_TERNARY.pair(T.IQ2_BN, T.IQ2_BN_R4, "iq2_bn", 64, 16, row_meta_size=4, cuda=((0, 16),)),
    # --- bytes; Q8_KV: per row a scale f32 and the sum of the codes i32, which its twin omits -------------------------
    _Q8_KV,
    interleaved(_Q8_KV, T.Q8_KV_R8, f"{_KERNELS}.formats_r4:Q8_KV", name="q8_KV_r8", row_meta_size=4),
    _BYTES_R.type(T.Q8_K_R8, "q8_k_r8", 256, 258, rows=8, layout="ikcli.quant.interleave:q8_k_r8"),
    _BYTES_R.type(T.Q8_K_R16, "q8_k_r16", 256, 258, rows=16, layout="ikcli.quant.interleave:q8_k_r16"),
    # --- activation buffers of the reference: numbered, but not for model files ---------------------------------------
    *(TensorType(t, name, block_size, type_size, row_meta_size, kind="activation")
      for t, name, block_size, type_size, row_meta_size in (
          (T.Q8_1, "q8_1", 32, 36, 0), (T.Q8_K, "q8_K", 256, 296, 0), (T.Q8_0_X4, "q8_0_x4", 32, 34, 0),
          (T.Q8_1_X4, "q8_1_x4", 32, 36, 0), (T.Q8_2_X4, "q8_2_x4", 32, 36, 0), (T.Q8_K64, "q8_K64", 64, 68, 0),
          (T.Q8_K16, "q8_K16", 64, 64, 20), (T.Q8_K32, "q8_K32", 256, 296, 0), (T.Q8_KR8, "q8_KR8", 256, 296, 0),
          (T.Q8_K128, "q8_K128", 128, 140, 0))),
)  # fmt: skip
TYPES: dict[GGMLType, TensorType] = {found.type: found for found in sorted(_RECORDS, key=lambda t: t.type)}


def add_type(record: TensorType) -> TensorType:
    """Enter a type of another package; raise a ValueError if its number or name is taken."""
    taken = next((t for t in TYPES.values() if t.type == record.type or t.name.lower() == record.name.lower()), None)
    if taken is not None:
        raise ValueError(f"tensor type {record.name} ({int(record.type)}): {taken.name} is {int(taken.type)}")
    TYPES[record.type] = record
    return record


def row_n_bytes(type: GGMLType, ne0: int) -> int:
    """Return the bytes of a row of `ne0` elements; raise a ValueError unless that is a multiple of the block size."""
    t = TYPES[type]
    if ne0 % t.block_size:
        raise ValueError(f"row length {ne0} is not a multiple of {t.block_size}, the block size of {t.name}")
    return t.row_meta_size + ne0 // t.block_size * t.type_size


def tensor_n_bytes(type: GGMLType, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape` = (ne0, ne1, ...); raise as `row_n_bytes` does."""
    n_bytes = row_n_bytes(type, shape[0])
    for ne in shape[1:]:
        n_bytes *= ne
    return n_bytes + TYPES[type].tensor_meta_size
