"""Describe the dequantized tile (packed panel) of each weight type, for kernels and lowering.

This module must not import Numba, because lowering uses it.

A tile holds 16 (TILE_ROWS) rows. Per 32 columns: a header of float32 vectors (one value per row), then 8 x 64 bytes,
group j holding bytes 4j..4j+3 of each row as unsigned codes. Modes:
    s32: scale               value = scale * (code - bias); bias: `tile_bias`
    m32: scale, minimum      value = scale * code + minimum
    s16: two scales (one per 16 columns)       m16: two scales, two minima       m32_16: scale, two minima
Where plain AVX2 multiplies signed bytes (`has_signs`), group j is 64 magnitudes and then 64 signs (0 or -1), and
behind the scales are as many vectors of the start values of integer sums.
"""

from __future__ import annotations

from typing import Any

from ikcli.native import isa

TILE_ROWS = 16
TILES_TOGETHER = 3  # multiplied with the same activations at a time
# That a thread may unpack at a time: the more, the fewer times it reads the activations.
TILE_COUNTS = (2 * TILES_TOGETHER, TILES_TOGETHER, 1)
MOST_TILES = TILE_COUNTS[0]
MOST_OF_TWO = 256  # rows of two matrices that a thread streams in turns, the rows of one after those of the other
_CACHE = 768 << 10  # bytes of tiles that stay in the second level, with room for activations
_SMALL_BIAS = 64  # with which no sum of two products leaves 16 bits
MOST_WITH_MINIMUM = 31  # the largest code of a type with minima
FIRST_SUM = 0x4B400000  # bits of 3 * 2^22 as float32; those of an integer n, |n| < 2^22, more are of n more
FIRST_SUM_F32 = 3.0 * 2**22
PAIRS_BLOCK = 128  # columns that share a scale where numbers become 16-bit integers
MORE_BYTES = 1024  # that AVX2 keeps with 256 columns of activations (`kernels/activations.py`)
HALF_STEP = 128  # columns of rows of which two in a row are read as one of 256 (`kernels/format_api.py`)
PAIRS_PART = 512  # columns of activations whose scales lie together, before them

# mode -> (header bytes, bytes per 32 columns)
LAYOUT = {"s32": (64, 576), "m32": (128, 640), "s16": (128, 640), "m16": (256, 768), "m32_16": (192, 704)}


def most_code(fmt: Any, mode: str) -> int:
    """Return the largest code of a row or group format, or the largest magnitude if its values are signed."""
    if mode[0] == "m":
        return int(fmt.most_with_minimum)
    return fmt.most_magnitude() or (2 * fmt.bias - 1 if fmt.bias else 128)


def scales_per_block(mode: str) -> int:
    """Return the scales that a row has per 32 columns."""
    return 2 if mode in ("s16", "m16") else 1


def minima_per_block(mode: str) -> int:
    """Return the minima that a row has per 32 columns."""
    return {"m32": 1, "m16": 2, "m32_16": 2}.get(mode, 0)


def folds_scales(fmt: Any) -> bool:
    """Return whether the codes in a tile are multiplied by whole scales of 16 columns.

    Where the products fit bytes and an instruction adds four products of bytes in 32 bits, this costs nothing, and a
    block of 32 columns is left with one scale.
    """
    return bool(fmt.folded_mode) and isa.current().vnni


def tile_mode(fmt: Any) -> str:
    """Return the mode of the tile of a row or group format."""
    return str(fmt.folded_mode if folds_scales(fmt) else fmt.mode)


def tile_bias(fmt: Any) -> int:
    """Return the bias on values of a symmetric mode in a tile: small where products of small codes are cheaper.

    0 on ARM64, which multiplies signed bytes.
    """
    if isa.current().is_arm64:
        return 0
    return fmt.bias if isa.current().plain_avx2 and 0 < fmt.bias <= _SMALL_BIAS else 128


def has_signs(mode: str, bias: int) -> bool:
    """Return whether a tile holds magnitudes and signs.

    Plain AVX2 multiplies magnitudes by the activations, which `xor` with a sign turns from x into -x - 1. The rest is
    the same for all activations: the start of a sum is the sum of the magnitudes of negative weights. Compared with an
    instruction that negates, `xor` leaves those units alone that multiply.
    """
    return mode[0] == "s" and bias == 128 and isa.current().plain_avx2


def has_whole_tile(fmt: Any) -> bool:
    """Return whether a tile with signs and scales per 16 columns holds whole scales.

    Its header then is the two whole scales, each twice as 16 bits; the start values of integer sums, times these; and
    what a sum is multiplied by.
    """
    return has_signs(fmt.mode, tile_bias(fmt)) and fmt.scales_are_bytes


def tile_layout(mode: str, bias: int) -> tuple[int, int]:
    """Return the bytes of the header and of 32 columns of a tile."""
    header, block_bytes = LAYOUT[mode]
    if not has_signs(mode, bias):
        return header, block_bytes
    return 2 * header, block_bytes + header + 8 * 64


def first_sum() -> int:
    """Return the start value of a tile's integer sums, or 0.

    With that start, the bits of a sum read as float32 are the sum plus FIRST_SUM_F32, so no conversion is needed: the
    product by the scale subtracts FIRST_SUM_F32 again. This pays where a conversion is one instruction of few ports,
    and where the start of a sum needs no other change.
    """
    return 0 if isa.current().signed_codes else FIRST_SUM


def tile_bytes(mode: str, k: int) -> int:
    """Return the bytes of a tile of k columns; unpacking writes whole steps of 256."""
    return -(-k // 256) * tile_bytes_per_step(mode)


def tile_bytes_per_step(mode: str) -> int:
    """Return the bytes of 256 columns of the largest tile of a mode."""
    return 8 * tile_layout(mode, 128)[1]


def multiplies_tiles_together() -> bool:
    """Return whether this machine has registers for TILES_TOGETHER tiles at once."""
    return "avx512vnni" in isa.current().features


def rows_at_once() -> int:
    """Return the activation rows that a tile is multiplied with at a time: as many sums as registers hold."""
    return 8 if "avx512f" in isa.current().features else 4


def few_rows(is_float: bool) -> int:
    """Return for how many activation rows weights are best read without unpacking them.

    Unpacking takes as long as the products of some rows, but tiles are multiplied faster.
    """
    target = isa.current()
    return 8 if "avx512f" in target.features or (target.short_vectors and not is_float) else 4


def rounds_activations() -> bool:
    """Return whether bfloat16 rows are multiplied with activations rounded to bfloat16."""
    return bool({"avx512bf16", "bf16"} & isa.current().features)


def multiplies_matrices() -> bool:
    """Return whether an instruction multiplies two rows of eight signed bytes by two others.

    Tiles then hold pairs of rows, eight columns of each (`kernels/gemm_arm64.py`).
    """
    return "i8mm" in isa.current().features


def quantized_bytes(k: int) -> int:
    """Return the bytes of one quantized activation row of k columns (`kernels/activations.py`)."""
    return -(-(k + 28 * (k // 32)) // 64) * 64 + -(-k // 256) * (256 + MORE_BYTES * isa.current().short_vectors)


def reads_two_rows() -> bool:
    """Return whether two rows of HALF_STEP columns are read as one (`kernels/format_api.py`)."""
    return not isa.current().is_arm64


def makes_integers() -> bool:
    """Return whether rows of f16, their activations and what attention reads become 16-bit integers.

    An instruction then multiplies twice as many of them as of float32.
    """
    return "avx2" in isa.current().features


def tiles_per_thread(mode: str, k: int) -> int:
    """Return the tiles of k columns that a thread unpacks at a time."""
    if not multiplies_tiles_together():
        return 1
    return next(n for n in TILE_COUNTS if n == 1 or n * tile_bytes(mode, k) <= _CACHE)
