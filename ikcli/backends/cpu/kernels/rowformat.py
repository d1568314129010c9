"""Describe weight formats whose rows stand alone, once for two uses.

A `RowFormat` says how 256 columns ("a step") of a stored row become 64-byte vectors of unsigned codes, scales, minima.
From that description two functions are generated as LLVM IR:

* `row_dot(format)` and `row_dots(format)` (`row_dot.py`; also `row_dot_avx2.py`, `row_dot_arm64.py`): the row times one
  quantized activation row or several, from memory (generation),
* `dequantize_row(format)`: the row as floats (embeddings). Prompts unpack 16 rows at once: `unpack_tile.py`.

Tile modes, and what a value is in each: `tile_modes.py`. For symmetric modes (s32, s16) codes are value + 128; the
matching -128 * sum of the activations is added per block. Activation rows: `kernels/activations.py`. The last step of a
row may have fewer than 8 blocks of 32 columns: it is copied to zero-filled memory first, so formats never see a partial
step.
"""

import contextlib
import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.tile_modes import MOST_WITH_MINIMUM, most_code
from ikcli.native import isa
from ikcli.native.simd.emit import I64
from ikcli.native.simd.vec import const_vector, f32x8, f32x16, i32x16, llvm_type, pointer

# How far ahead weights are prefetched: at 40 GB/s, 8 KiB are what a core reads in 200 ns. In 32 KiB, which slower cores
# have, so many lines and the activations would displace each other.
PREFETCH_BYTES = 4096 if isa.first_level_bytes() <= 32 << 10 else 8192
_MOST_LINES = 16  # that are prefetched at once: Zen 3 waits for 24 lines, older cores for 10 or 12
_I8 = ir.IntType(8)


def exponent_scales(e, v):
    """Return 2**(x - 128) for 8 exponents of 8 bits; those below 2 give denormal numbers."""
    normal = e.b.shl(e.b.sub(v, e.ints([1] * 8)), e.ints([23] * 8))
    tiny = e.b.shl(e.ints([0x00200000] * 8), e.b.and_(v, e.ints([1] * 8)))
    bits = e.b.select(e.b.icmp_signed("<", v, e.ints([2] * 8)), tiny, normal)
    return e.b.bitcast(bits, e.zero8().type)


def biased(table, bias):
    """Return table values as codes."""
    return [int(v) + bias for v in table]


class WeightFormat:
    """Base of formats of rows and of groups: numbers of the tensor type (`gguf/type_record.py`)."""

    scales_are_bytes = False  # whether there are `scale_bytes` per 16 columns, i8x16, times `units`
    most_with_minimum = MOST_WITH_MINIMUM  # the largest code (modes with minima)
    folded_mode = ""  # the mode of tiles of `folded_codes`, if the format has them: see `tile_modes.folds_scales`

    def __init__(self, name, mode, block_size, type_size, row_meta_size, rows, matmul_scale):
        self.name, self.mode, self.rows, self.matmul_scale = name, mode, rows, matmul_scale
        self.block_columns, self.block_bytes = block_size, rows * type_size  # of the smallest stored unit
        self.step_bytes = 256 // block_size * self.block_bytes  # of 256 columns
        self.header_bytes = rows * row_meta_size


class RowFormat(WeightFormat):
    """One format. `w` is the address of a step's bytes, `row` what `header` returned (a row scale, or None)."""

    shift = 0  # what dot_codes leaves out of the codes of `shifted_blocks`
    full_range = False  # whether a value may be -128

    @property
    def bias(self):
        """dot_codes - bias is a value (symmetric modes). A power of two, small: its sums cancel in float32.

        0, for signed bytes, where values need all 8 bits and AVX2 or ARM64 multiplies.
        """
        return 0 if isa.current().short_vectors or isa.current().is_arm64 else 128

    def header(self, e, w):
        """Read the row header."""

    def codes(self, e, w, j):
        """Return unsigned codes of columns 64j .. 64j+63 as i8x64: value + 128 in symmetric modes."""
        return e.b.sub(self.dot_codes(e, w, j), e.const64(self.bias - 128))

    def dot_codes(self, e, w, j):
        """Return the codes with `bias` instead of 128 (symmetric modes).

        In the `shifted_blocks` they are `shift` smaller.
        """
        return self.codes(e, w, j)

    def most_magnitude(self):
        """Return 0, or the largest magnitude of a value if `magnitudes` is to be used."""
        return 0

    def magnitudes(self, e, w, j):
        """Return values of columns 64j .. 64j+63 as magnitudes and signs (1 or -1)."""
        raise NotImplementedError

    def quarters(self, e, w):
        """Return `dot_codes` as four vectors.

        Lane b of vector n: columns 4n .. 4n+3 of block b of 16. None: by shuffles.
        """

    quarter_shifts = None  # `quarters` are codes times 2**quarter_shifts[b] in block b, for modes with minima

    def shifted_blocks(self, e, w):
        """Return a mask of the blocks of 32 (modes *16: of 16) columns whose `dot_codes` are too small, or None."""

    def scales(self, e, w, row):
        """Return f32x8 (modes *32) or f32x16 (modes *16)."""
        raise NotImplementedError

    def minima(self, e, w, row):
        """Return the minima like the scales, for modes m32 and m16."""
        raise NotImplementedError

    signed_scales, most_scale = True, 32  # whether whole scales are signed, the largest magnitude of these
    # what products of whole scales and `crossed_codes` are multiplied by besides `units`, for blocks 0, 1 .. of four
    whole_units = (1.0,) * 8
    whole_minima_at = 0

    def most_dot_code(self):
        """Return the largest code, or magnitude of a value if these are signed."""
        return most_code(self, self.mode)

    def paired_codes(self, e, w, n):
        """Return codes as `dot_codes` does, but columns 0..15, 32..47, 16..31, 48..63 from 64n on.

        For nibbles of which the lower ones are 16 columns and the upper ones the next. With AVX2 only.
        """

    def crossed_codes(self, e, w, h, n):
        """Return `dot_codes` of columns 4n .. 4n+3 of blocks of 16, of which columns 128h .. have eight.

        Every other block comes first; codes may be multiples of which `whole_units` take account. For bit fields that
        such blocks have at the same bytes: one shuffle of these takes the place of those that bring sums side by side.
        With AVX2 only.
        """

    def folded_codes(self, e, w, j):
        """Return `codes` times whole scales of 16 columns, with a bias of 128 in symmetric modes."""
        raise NotImplementedError

    def folded_scales(self, e, w):
        """Return f32x8: what blocks of `folded_codes` are multiplied by."""
        raise NotImplementedError

    def whole_scales(self, e, w):
        """Return the scales of 16 blocks of 16 columns as bytes, or None if they are no integers.

        With AVX2 only, as i8x32: the same in both halves. Blocks have 256 columns.
        """

    def shifted_words(self, e, w):
        """Return `shifted_blocks` as 16 lanes of 16 bits, 0 or -1, for formats with whole scales."""

    def whole_minima(self, e, w):
        """Return the minima like the whole scales, for mode m16: bits `whole_minima_at` and up of bytes."""

    def units(self, e, w, row):
        """Return f32x8 of what all whole scales of a step are multiplied by, and the same for the minima or None."""


def steps(e, fmt, w, k):
    """Yield (step index, address, None) inside a loop over whole steps, then (.., .., valid blocks) for the rest."""
    for i, (at,), valid in steps_of_rows(e, fmt, [w], k):
        yield i, at, valid


def steps_of_rows(e, fmt, rows, k):
    """Yield what `steps` does, with the addresses of several rows."""
    whole = e.b.lshr(k, e.int(8))
    with e.loop(whole) as i:
        yield i, [e.offset(w, e.times(i, fmt.step_bytes)) for w in rows], None
    if fmt.block_columns == 256:
        return
    rest = e.b.and_(k, e.int(255))
    with e.b.if_then(e.b.icmp_signed("!=", rest, e.int(0))):
        places = []
        for w in rows:
            with e.b.goto_entry_block():
                copy = e.b.alloca(ir.ArrayType(_I8, fmt.step_bytes))
            e.b.store(ir.Constant(ir.ArrayType(_I8, fmt.step_bytes), None), copy)
            places.append(e.b.ptrtoint(copy, I64))
            src = e.offset(w, e.times(whole, fmt.step_bytes))
            copy_blocks(e, fmt, src, places[-1], e.b.udiv(rest, e.int(fmt.block_columns)))
        yield whole, places, e.b.lshr(rest, e.int(5))


def prefetch_step(e, fmt, at, *, part=0, n_parts=1, ahead=PREFETCH_BYTES):
    """Prefetch a part of the data that is read some steps later, `ahead` in memory; the next rows follow there.

    Every line, and into the first level: hardware prefetchers stop at the end of a page, and do not foresee steps that
    are not read from front to back. A step of several rows has dozens of lines, too many to ask for at once.
    """
    lines = range(0, fmt.step_bytes, 64)
    if n_parts > 1 and len(lines) > _MOST_LINES:
        e.barrier()  # LLVM would prefetch all parts first
    for line in lines[len(lines) * part // n_parts : len(lines) * (part + 1) // n_parts]:
        e.prefetch(e.offset(at, ahead, line))


def ahead_in_rows(e, at, near, row_bytes, others):
    """Return how far ahead to prefetch in each of several rows that are read side by side, `at` bytes into them.

    That is `near`, but what follows the end of a row is read with the rows behind these: `others` more, the bytes of
    all these rows but one. All are i64.
    """
    past = e.b.icmp_signed(">=", e.offset(at, near), row_bytes)
    return e.b.select(past, e.offset(others, near), near)


def copy_blocks(e, fmt, src, to, n_blocks):
    """Copy n_blocks stored units, eight bytes at a time; the last move of a unit overlaps the one before."""
    wide = min(8, fmt.block_bytes)
    t = ir.IntType(8 * wide)
    starts = [*range(0, fmt.block_bytes - wide, wide), fmt.block_bytes - wide]
    with e.loop(n_blocks) as i:
        at = e.times(i, fmt.block_bytes)
        for s in starts:
            x = e.b.load(pointer(e.b, e.offset(src, at, s), t), align=1)
            e.b.store(x, pointer(e.b, e.offset(to, at, s), t), align=1)


def _if_block(e, block, valid):
    """Emit code for a block of 32 columns that a partial step may lack."""
    if valid is None:
        return contextlib.nullcontext()
    return e.b.if_then(e.b.icmp_signed("<", e.int(block), valid))


@functools.cache
def dequantize_row(fmt):
    """Return dequantize(w, out, k): a row as k floats."""
    mode = fmt.mode
    per = 32 if mode.endswith("32") else 16
    with_min = mode.startswith("m")

    def sixteen(e, codes, first, scales, minima):
        """Return columns first .. first+15 of a step, from the 64 codes that contain them."""
        v = e.b.zext(e.pick(codes, range(first % 64, first % 64 + 16)), llvm_type(i32x16))
        v = v if with_min else e.b.sub(v, e.ints([128] * 16, i32x16))
        block = [first // per] * 16
        v = e.mul(e.ints_to_f32(v), e.pick(scales, block))
        return e.b.fadd(v, e.pick(minima, block)) if with_min else v

    @intrinsic
    def dequantize(typingctx, w, out, k):
        def codegen(context, builder, sig, args):
            w, out, k = args
            e = RowEmitter(builder)
            row = fmt.header(e, w)
            constant = const_vector(f32x8 if per == 32 else f32x16, [1 / fmt.matmul_scale] * (256 // per))
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                to = e.offset(out, e.times(i, 1024))
                scales = e.mul(fmt.scales(e, at_w, row), constant)
                minima = fmt.minima(e, at_w, row) if with_min else None
                codes = [fmt.codes(e, at_w, j) for j in range(4)]
                for block in range(8):
                    with _if_block(e, block, valid):
                        for first in (32 * block, 32 * block + 16):
                            x = sixteen(e, codes[block // 2], first, scales, minima)
                            e.store(x, e.offset(to, 4 * first))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return dequantize
