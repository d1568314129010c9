"""Numbers of GGUF and ggml: value types, tensor type ids (described in `types.py`), file types and their labels.

Corresponds to `enum ggml_type` and `llama_model_ftype_name` of ik_llama.cpp. `gguf.constants` of gguf-py is not used:
it lacks the types of ik_llama.cpp, and importing it would slow the start of every command.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GGUF_MAGIC = b"GGUF"
GGUF_VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
FILE_TYPE_GUESSED = 1024  # bit that marks a file type derived from the tensors


class GGUFValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# NumPy dtype and struct code of every fixed-size value type.
SCALAR_CODES: dict[GGUFValueType, tuple[str, str]] = {
    GGUFValueType.UINT8: ("<u1", "<B"),
    GGUFValueType.INT8: ("<i1", "<b"),
    GGUFValueType.UINT16: ("<u2", "<H"),
    GGUFValueType.INT16: ("<i2", "<h"),
    GGUFValueType.UINT32: ("<u4", "<I"),
    GGUFValueType.INT32: ("<i4", "<i"),
    GGUFValueType.FLOAT32: ("<f4", "<f"),
    GGUFValueType.BOOL: ("|b1", "<?"),
    GGUFValueType.UINT64: ("<u8", "<Q"),
    GGUFValueType.INT64: ("<i8", "<q"),
    GGUFValueType.FLOAT64: ("<f8", "<d"),
}
INTEGER_TYPES = frozenset(
    {
        GGUFValueType.UINT8,
        GGUFValueType.INT8,
        GGUFValueType.UINT16,
        GGUFValueType.INT16,
        GGUFValueType.UINT32,
        GGUFValueType.INT32,
        GGUFValueType.UINT64,
        GGUFValueType.INT64,
    }
)
FLOAT_TYPES = frozenset({GGUFValueType.FLOAT32, GGUFValueType.FLOAT64})


_ADDED: dict[object, GGMLType] = {}


class GGMLType(IntEnum):
    """Tensor type ids as stored in GGUF tensor infos and in activation buffers."""

    @classmethod
    def _missing_(cls, value: object) -> GGMLType | None:
        return _ADDED.get(value)

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    Q4_0_4_4 = 31
    Q4_0_4_8 = 32
    Q4_0_8_8 = 33
    TQ1_0 = 34
    TQ2_0 = 35
    I2_S = 36
    MXFP4 = 39
    NVFP4 = 40
    Q1_0_G128 = 41
    Q2_0 = 42
    Q8_0_X4 = 97
    Q8_1_X4 = 98
    Q8_2_X4 = 99
    Q6_0 = 133
    IQ1_BN = 134
    IQ2_BN = 135
    Q8_K64 = 136
    IQ2_K = 137
    IQ3_K = 138
    IQ4_K = 139
    IQ5_K = 140
    IQ6_K = 141
    IQ4_KS = 144
    IQ2_KS = 145
    IQ4_KSS = 146
    Q8_K16 = 147
    Q8_K32 = 148
    Q8_KR8 = 149
    Q8_K128 = 150
    Q8_KV = 151
    IQ5_KS = 152
    IQ2_KT = 153
    IQ3_KT = 154
    IQ4_KT = 155
    IQ3_KS = 156
    IQ2_KL = 157
    IQ1_KT = 158
    Q4_0_R8 = 202
    Q5_0_R4 = 206
    Q8_0_R8 = 208
    Q2_K_R4 = 210
    Q3_K_R4 = 211
    Q4_K_R4 = 212
    Q5_K_R4 = 213
    Q6_K_R4 = 214
    IQ2_XXS_R4 = 216
    IQ2_XS_R4 = 217
    IQ3_XXS_R4 = 218
    IQ1_S_R4 = 219
    IQ4_NL_R4 = 220
    IQ3_S_R4 = 221
    IQ2_S_R4 = 222
    IQ4_XS_R8 = 223
    IQ1_M_R4 = 229
    BF16_R16 = 230
    Q6_0_R4 = 233
    IQ2_BN_R4 = 335
    IQ2_K_R4 = 337
    IQ3_K_R4 = 338
    IQ4_K_R4 = 339
    IQ5_K_R4 = 340
    IQ4_KS_R4 = 344
    IQ5_KS_R4 = 352
    MXFP4_R8 = 353
    Q8_K_R16 = 397
    Q8_KV_R8 = 398
    Q8_K_R8 = 399


def new_type_id(number: int, name: str) -> GGMLType:
    """Return the id of a tensor type of another package, always the same; raise a ValueError if the number is taken."""
    if number in GGMLType.__members__.values():
        raise ValueError(f"tensor type id {number} is that of {GGMLType(number).name}")
    if number not in _ADDED:
        member = int.__new__(GGMLType, number)
        member._value_, member._name_ = number, name
        _ADDED[number] = member
    return _ADDED[number]


@dataclass(frozen=True, slots=True)
class FileType:
    """A `general.file_type`: number, names that the quantize command accepts, label and default tensor type."""

    number: int
    names: tuple[str, ...]
    label: str
    type: GGMLType


_FILE_TYPES = (
    FileType(0, ("F32",), "all F32", GGMLType.F32),
    FileType(1, ("F16",), "F16", GGMLType.F16),
    FileType(2, ("Q4_0",), "Q4_0", GGMLType.Q4_0),
    FileType(3, ("Q4_1",), "Q4_1", GGMLType.Q4_1),
    FileType(7, ("Q8_0",), "Q8_0", GGMLType.Q8_0),
    FileType(8, ("Q5_0",), "Q5_0", GGMLType.Q5_0),
    FileType(9, ("Q5_1",), "Q5_1", GGMLType.Q5_1),
    FileType(10, ("Q2_K",), "Q2_K - Medium", GGMLType.Q2_K),
    FileType(11, ("Q3_K_S",), "Q3_K - Small", GGMLType.Q3_K),
    FileType(12, ("Q3_K", "Q3_K_M"), "Q3_K - Medium", GGMLType.Q3_K),
    FileType(13, ("Q3_K_L",), "Q3_K - Large", GGMLType.Q3_K),
    FileType(14, ("Q4_K_S",), "Q4_K - Small", GGMLType.Q4_K),
    FileType(15, ("Q4_K", "Q4_K_M"), "Q4_K - Medium", GGMLType.Q4_K),
    FileType(16, ("Q5_K_S",), "Q5_K - Small", GGMLType.Q5_K),
    FileType(17, ("Q5_K", "Q5_K_M"), "Q5_K - Medium", GGMLType.Q5_K),
    FileType(18, ("Q6_K",), "Q6_K", GGMLType.Q6_K),
    FileType(19, ("IQ2_XXS",), "IQ2_XXS - 2.0625 bpw", GGMLType.IQ2_XXS),
    FileType(20, ("IQ2_XS",), "IQ2_XS - 2.3125 bpw", GGMLType.IQ2_XS),
    FileType(21, ("Q2_K_S",), "Q2_K - Small", GGMLType.Q2_K),
    FileType(22, ("IQ3_XS",), "IQ3_XS - 3.3 bpw", GGMLType.IQ3_S),
    FileType(23, ("IQ3_XXS",), "IQ3_XXS - 3.0625 bpw", GGMLType.IQ3_XXS),
    FileType(24, ("IQ1_S",), "IQ1_S - 1.5625 bpw", GGMLType.IQ1_S),
    FileType(25, ("IQ4_NL",), "IQ4_NL - 4.5 bpw", GGMLType.IQ4_NL),
    FileType(26, ("IQ3_S",), "IQ3_S - 3.4375 bpw", GGMLType.IQ3_S),
    FileType(27, ("IQ3_M",), "IQ3_S mix - 3.66 bpw", GGMLType.IQ3_S),
    FileType(28, ("IQ2_S",), "IQ2_S - 2.5 bpw", GGMLType.IQ2_XS),
    FileType(29, ("IQ2_M",), "IQ2_M - 2.7 bpw", GGMLType.IQ2_S),
    FileType(30, ("IQ4_XS",), "IQ4_XS - 4.25 bpw", GGMLType.IQ4_XS),
    FileType(31, ("IQ1_M",), "IQ1_M - 1.75 bpw", GGMLType.IQ1_M),
    FileType(32, ("BF16",), "BF16", GGMLType.BF16),
    FileType(33, ("Q4_0_4_4",), "Q4_0_4_4", GGMLType.Q4_0_4_4),
    FileType(34, ("Q4_0_4_8",), "Q4_0_4_8", GGMLType.Q4_0_4_8),
    FileType(35, ("Q4_0_8_8",), "Q4_0_8_8", GGMLType.Q4_0_8_8),
    FileType(36, ("TQ1_0",), "TQ1_0 - 1.69 bpw ternary", GGMLType.TQ1_0),
    FileType(37, ("TQ2_0",), "TQ2_0 - 2.06 bpw ternary", GGMLType.TQ2_0),
    FileType(38, ("MXFP4",), "MXFP4 - 4.25 bpw", GGMLType.MXFP4),
    FileType(39, (), "NVFP4 - 4.5 bpw", GGMLType.NVFP4),
    FileType(41, (), "Q1_0_G128 - 1.125 bpw", GGMLType.Q1_0_G128),
    FileType(135, ("Q6_0",), "Q6_0", GGMLType.Q6_0),
    FileType(136, ("IQ1_BN",), "IQ1_BN - 1.625 bpw Bitnet", GGMLType.IQ1_BN),
    FileType(137, ("IQ2_BN",), "IQ2_BN - 2.00 bpw Bitnet", GGMLType.IQ2_BN),
    FileType(138, ("IQ2_K",), "IQ2_K - 2.375 bpw", GGMLType.IQ2_K),
    FileType(139, ("IQ3_K",), "IQ3_K - 3.4325 bpw", GGMLType.IQ3_K),
    FileType(140, ("IQ4_K",), "IQ4_K - 4.5 bpw", GGMLType.IQ4_K),
    FileType(141, ("IQ5_K",), "IQ5_K - 5.5 bpw", GGMLType.IQ5_K),
    FileType(142, ("IQ6_K",), "IQ6_K - 6.6 bpw", GGMLType.IQ6_K),
    FileType(145, ("IQ4_KS",), "IQ4_KS - 4.25 bpw", GGMLType.IQ4_KS),
    FileType(146, ("IQ3_KL",), "IQ3_KL - 4 bpw", GGMLType.IQ3_K),
    FileType(147, ("IQ2_KS",), "IQ2_KS - 2.1875 bpw", GGMLType.IQ2_KS),
    FileType(148, ("IQ4_KSS",), "IQ4_KSS - 4.0 bpw", GGMLType.IQ4_KSS),
    FileType(149, ("Q8_KV",), "Q8_KV", GGMLType.Q8_KV),
    FileType(150, ("IQ5_KS",), "IQ5_KS - 5.25 bpw", GGMLType.IQ5_KS),
    FileType(151, ("IQ2_KT",), "IQ2_KT - 2.125 bpw", GGMLType.IQ2_KT),
    FileType(152, ("IQ3_KT",), "IQ3_KT - 3.125 bpw", GGMLType.IQ3_KT),
    FileType(153, ("IQ4_KT",), "IQ4_KT - 4.0 bpw", GGMLType.IQ4_KT),
    FileType(154, ("IQ3_KS",), "IQ3_KS - 3.1875 bpw", GGMLType.IQ3_KS),
    FileType(155, ("IQ2_KL",), "IQ2_KL - 2.6875 bpw", GGMLType.IQ2_KL),
    FileType(156, ("IQ1_KT",), "IQ1_KT - 1.75 bpw", GGMLType.IQ1_KT),
    FileType(202, ("Q4_0_R8",), "Q4_0_R8 - 4.5 bpw", GGMLType.Q4_0_R8),
    FileType(207, ("Q8_0_R8",), "Q8_0_R8 - 8.5 bpw", GGMLType.Q8_0_R8),
    FileType(208, ("Q5_0_R4",), "Q5_0_R4 - 5.5 bpw", GGMLType.Q5_0_R4),
    FileType(210, ("Q2_K_R4",), "Q2_K_R4", GGMLType.Q2_K_R4),
    FileType(211, ("Q3_K_R4",), "Q3_K_R4", GGMLType.Q3_K_R4),
    FileType(214, ("Q4_K_R4",), "Q4_K_R4", GGMLType.Q4_K_R4),
    FileType(216, ("Q5_K_R4",), "Q5_K_R4", GGMLType.Q5_K_R4),
    FileType(218, ("Q6_K_R4",), "Q6_K_R4", GGMLType.Q6_K_R4),
    FileType(219, ("IQ2_XXS_R4",), "IQ2_XXS_R4 - 2.0625 bpw", GGMLType.IQ2_XXS_R4),
    FileType(220, ("IQ2_XS_R4",), "IQ2_XS_R4 - 2.3125 bpw", GGMLType.IQ2_XS_R4),
    FileType(223, ("IQ3_XXS_R4",), "IQ3_XXS_R4 - 3.0625 bpw", GGMLType.IQ3_XXS_R4),
    FileType(224, ("IQ1_S_R4",), "IQ1_S_R4 - 1.5 bpw", GGMLType.IQ1_S_R4),
    FileType(225, ("IQ4_NL_R4",), "IQ4_NL_R4 - 4.5 bpw", GGMLType.IQ4_NL_R4),
    FileType(226, ("IQ3_S_R4",), "IQ3_S_R4 - 3.4375 bpw", GGMLType.IQ3_S_R4),
    FileType(229, ("IQ2_M_R4",), "IQ2_M_R4 - 2.7 bpw", GGMLType.IQ2_S_R4),
    FileType(230, ("IQ4_XS_R8",), "IQ4_XS_R8 - 4.25 bpw", GGMLType.IQ4_XS_R8),
    FileType(231, ("IQ1_M_R4",), "IQ1_M_R4 - 1.75 bpw", GGMLType.IQ1_M_R4),
    FileType(232, ("BF16_R16",), "BF16_R16", GGMLType.BF16_R16),
    FileType(335, ("Q6_0_R4",), "Q6_0_R4 - 6.5 bpw", GGMLType.Q6_0_R4),
    FileType(337, ("IQ2_BN_R4",), "IQ2_BN_R4 - 2.00 bpw Bitnet", GGMLType.IQ2_BN_R4),
    FileType(338, ("IQ2_K_R4",), "IQ2_K_R4 - 2.375 bpw", GGMLType.IQ2_K_R4),
    FileType(339, ("IQ3_K_R4",), "IQ3_K_R4 - 3.4325 bpw", GGMLType.IQ3_K_R4),
    FileType(340, ("IQ4_K_R4",), "IQ4_K_R4 - 4.5 bpw", GGMLType.IQ4_K_R4),
    FileType(341, ("IQ5_K_R4",), "IQ5_K_R4 - 5.5 bpw", GGMLType.IQ5_K_R4),
    FileType(345, ("IQ4_KS_R4",), "IQ4_KS_R4 - 4.25 bpw", GGMLType.IQ4_KS_R4),
    FileType(350, ("IQ5_KS_R4",), "IQ5_KS_R4 - 5.25 bpw", GGMLType.IQ5_KS_R4),
    FileType(351, ("MXFP4_R8",), "MXFP4_R8 - 4.25 bpw", GGMLType.MXFP4_R8),
    FileType(398, ("Q8_KV_R8",), "Q8_KV_R8", GGMLType.Q8_KV_R8),
    FileType(399, ("Q8_K_R8",), "Q8_K_R8", GGMLType.Q8_K_R8),
)
FILE_TYPES: dict[int, FileType] = {f.number: f for f in _FILE_TYPES}


def file_type_label(number: int) -> str:
    """Return the label of a `general.file_type`, e.g. `IQ2_K_R4 - 2.375 bpw`; bit 1024 adds ` (guessed)`."""
    if number & FILE_TYPE_GUESSED:
        return file_type_label(number & ~FILE_TYPE_GUESSED) + " (guessed)"
    known = FILE_TYPES.get(number)
    return known.label if known else f"unknown file type {number}"
