"""Codebooks: short value tables of the non-linear types, grids of the i-quants, the trellis generator.

The index of a table entry is the code stored in the file. Tables of the IQ*_K and KS types are pairs (base row, shifted
row); the shifted row is the base row plus a constant. The grids come from the `gguf` package, which is imported on
first use. Corresponds to the tables of ggml-common.h and to the trellis of
https://github.com/ikawrakow/ik_llama.cpp/pull/113.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def _numbers(text: str) -> Floats:
    return np.array(text.split(), np.float32)


def _pair(base: str, shift: int) -> Floats:
    row = _numbers(base)
    return np.stack((row, row + np.float32(shift)))


IQ2_VALUES = _pair("-31 -13 1 17", 5)
IQ3_VALUES = _pair("-63 -40 -23 -10 1 13 28 47", 4)
IQ4_VALUES = _pair("-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113", 4)
IQ5_VALUES = _pair(
    "-126 -114 -103 -92 -83 -74 -65 -57 -50 -43 -36 -30 -24 -18 -12 -6"
    " -1 5 11 17 23 29 36 43 51 59 68 77 87 97 109 121",
    2,
)
IQ6_VALUES = _pair(
    "-127 -121 -115 -109 -104 -98 -93 -88 -84 -79 -74 -70 -66 -62 -58 -54"
    " -51 -47 -44 -40 -37 -34 -31 -28 -25 -22 -19 -16 -13 -11 -8 -5"
    " -2 0 3 6 9 12 14 17 20 23 27 30 33 36 40 44"
    " 47 51 55 59 63 68 72 77 82 87 92 98 103 109 115 121",
    1,
)
IQ4_NL_VALUES = IQ4_VALUES[0]
MXFP4_VALUES = _numbers("0 1 2 3 4 6 8 12 0 -1 -2 -3 -4 -6 -8 -12")  # doubled E2M1

# Pairs of IQ2_KL: values of the even and of the odd element, all of them entries of IQ3_VALUES[0]. (32, 2)
IQ2_KL_VALUES = _numbers(
    "-63 -23  -63  13  -40 -63  -40 -10  -40  13  -40  47  -23 -40  -23 -23"
    " -23   1  -23  13  -23  28  -10 -63  -10   1  -10  13  -10  47    1 -23"
    "   1 -10    1   1    1  13    1  28   13 -40   13 -23   13 -10   13   1"
    "  13  13   28 -63   28 -23   28   1   28  28   28  47   47 -23   47  13"
).reshape(32, 2)

TRELLIS_OFFSET = 4096
TRELLIS_OFFSET_HIGH = 4096 + 32768  # second half of the table of IQ4_KT
_TRELLIS_FACTOR = 0xCBAC1FED


@cache
def grid(name: str) -> Floats:
    """Return the grid of IQ2_XXS, IQ2_XS, IQ2_S (n, 8), IQ3_XXS, IQ3_S (n, 4), IQ1_S or IQ1_M (2048, 8); read-only."""
    from gguf import quants

    source: Any = getattr(quants, "IQ1_S" if name == "IQ1_M" else name)
    source.init_grid()
    values = np.array(source.grid, np.float32)
    return _frozen(values.reshape(-1, values.shape[-1]))


@cache
def sign_table() -> Floats:
    """Return (256, 8) of +1 and -1: bit j of a sign byte set makes element j negative."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return _frozen(1 - 2 * bits.astype(np.float32))


def sign_bytes(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Turn 7-bit sign codes into sign bytes: the eighth bit makes the number of minus signs even."""
    low: npt.NDArray[np.uint8] = (codes & 127).astype(np.uint8)
    parity = low ^ low >> np.uint8(4)
    parity ^= parity >> np.uint8(2)
    parity ^= parity >> np.uint8(1)
    return low | parity << np.uint8(7)


@cache
def trellis(n_values: int, offset: int = TRELLIS_OFFSET, n_rows: int = 65536) -> Floats:
    """Return (n_rows, n_values) outputs of the generator; row i holds the values of trellis index i; read-only."""
    state = np.arange(n_rows, dtype=np.uint32) + np.uint32(offset)
    out = np.empty((n_rows, n_values), np.float32)
    for i in range(n_values):
        state = state * np.uint32(_TRELLIS_FACTOR)
        low_bits = (state & np.uint32(0x3F3F3F3F)).view(np.uint8).reshape(-1, 4)
        out[:, i] = low_bits.sum(axis=1, dtype=np.int32) - 126
    return _frozen(out)


def _frozen(values: Floats) -> Floats:
    values.flags.writeable = False
    return values
