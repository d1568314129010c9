"""One stored weight row times one quantized activation row, 64 columns at a time (generation: memory-bound).

Per format there is only the unpacking of 64 codes; scales of 8 blocks are decoded as vectors and spread with one
permutation per step. Symmetric codes are biased to code + 128; the matching -128*sum(q) of the activations enters as
the start value of the dot product, in the first lane of each block, so integer arithmetic stays exact.
Activation rows: kernels/activations.py. Emitted as LLVM IR: LLVM schedules and unrolls, Numba sees one call.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.simd.emit import I32, I64, Emitter
from ikcli.backends.cpu.simd.lanes import packed_scales_6bit
from ikcli.backends.cpu.simd.vec import (
    call_llvm,
    const_vector,
    f32x8,
    f32x16,
    i8x16,
    i8x32,
    i8x64,
    i32x8,
    i32x16,
    llvm_type,
    pointer,
)

_I8, _HALF = ir.IntType(8), ir.HalfType()


def _indices(values):
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


class _Row(Emitter):
    """Emitter with the values of one super-block (8 blocks of 32 columns) at hand."""

    def bytes64(self, lo, hi):
        return self.b.shuffle_vector(lo, hi, _indices(range(64)))

    def const64(self, x):
        return const_vector(i8x64, [x] * 64)

    def twice(self, address):
        """The same 32 bytes in both halves."""
        v = self.load(i8x32, address)
        return self.b.shuffle_vector(v, v, _indices([*range(32), *range(32)]))

    def shift_halves(self, v, lo, hi):
        """Bytes shifted right by lo (first half) and hi (second half); bits may leak in from neighbours: mask after."""
        words = self.b.bitcast(v, llvm_type(i32x16))
        return self.b.bitcast(self.b.lshr(words, const_vector(i32x16, [lo] * 8 + [hi] * 8)), llvm_type(i8x64))

    def shift_left(self, v, n):
        words = self.b.bitcast(v, llvm_type(i32x16))
        return self.b.bitcast(self.b.shl(words, const_vector(i32x16, [n] * 16)), llvm_type(i8x64))

    def mask(self, v, m):
        return self.b.and_(v, self.const64(m))

    def spread(self, v, lanes):
        """f32x16 with lane i taken from lane lanes[i] of v (f32x8 or f32x16)."""
        return self.b.shuffle_vector(v, v, _indices(lanes))

    def starts(self, sums, lanes, step):
        """Start value of a dot product: sums[lane] every `step` lanes, zeros between."""
        zero = const_vector(i32x8 if sums.type.count == 8 else i32x16, [0] * sums.type.count)
        n = sums.type.count
        return self.b.shuffle_vector(
            sums, zero, _indices([lanes[i // step] if i % step == 0 else n for i in range(16)])
        )

    def halves_at(self, address, stride, count=8):
        """f32 of `count` half floats, `stride` bytes apart."""
        t = ir.VectorType(ir.IntType(16), count)
        v = ir.Constant(t, ir.Undefined)
        for i in range(count):
            x = self.b.load(pointer(self.b, self.offset(address, i * stride), ir.IntType(16)), align=1)
            v = self.b.insert_element(v, x, ir.Constant(I32, i))
        return self.b.fpext(self.b.bitcast(v, ir.VectorType(_HALF, count)), llvm_type(f32x8))

    def splat_half(self, address, vec, sign=1):
        x = self.b.fpext(self.b.load(pointer(self.b, address, _HALF), align=1), ir.FloatType())
        if sign < 0:
            x = self.b.fneg(x)
        t = llvm_type(vec)
        one = self.b.insert_element(ir.Constant(t, ir.Undefined), x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, one, _indices([0] * vec.n))

    def mul(self, x, y):
        return self.b.fmul(x, y)

    def fma8(self, a, b, c):
        return call_llvm(self.b, "llvm.fma.v8f32", a.type, [a, b, c])


# --- codes of blocks 2j and 2j+1, as 64 unsigned bytes ----------------------------------------------------------------
def _codes_q8_0(e, w, j):
    lo, hi = (e.load(i8x32, e.offset(w, 34 * b + 2)) for b in (2 * j, 2 * j + 1))
    return e.b.xor(e.bytes64(lo, hi), e.const64(-128))


def _nibble_pair(e, w, j, block_bytes, at):
    """Nibbles of two 16-byte blocks in element order: lo, hi of the first, lo, hi of the second."""
    lo, hi = (e.load(i8x16, e.offset(w, block_bytes * b + at)) for b in (2 * j, 2 * j + 1))
    both = e.b.shuffle_vector(lo, hi, _indices([*range(16), *range(16), *range(16, 32), *range(16, 32)]))
    words = e.b.bitcast(both, llvm_type(i32x16))
    shifted = e.b.lshr(words, const_vector(i32x16, [0] * 4 + [4] * 4 + [0] * 4 + [4] * 4))
    return e.mask(e.b.bitcast(shifted, llvm_type(i8x64)), 15)


def _codes_q4_0(e, w, j):
    return e.b.add(_nibble_pair(e, w, j, 18, 2), e.const64(120))


def _codes_q5_0(e, w, j):
    bits = [e.b.zext(e.b.load(pointer(e.b, e.offset(w, 22 * b + 2), I32), align=1), I64) for b in (2 * j, 2 * j + 1)]
    both = e.b.or_(bits[0], e.b.shl(bits[1], ir.Constant(I64, 32)))
    high = e.b.bitcast(both, ir.VectorType(ir.IntType(1), 64))
    low = e.b.add(_nibble_pair(e, w, j, 22, 6), e.const64(112))
    return e.b.select(high, e.b.add(low, e.const64(16)), low)


def _codes_q4_k(e, w, j):
    return e.mask(e.shift_halves(e.twice(e.offset(w, 16 + 32 * j)), 0, 4), 15)


def _codes_q5_k(e, w, j):
    low = e.mask(e.shift_halves(e.twice(e.offset(w, 48 + 32 * j)), 0, 4), 15)
    high = e.mask(e.shift_halves(e.twice(e.offset(w, 16)), 2 * j, 2 * j + 1), 1)
    return e.b.or_(low, e.shift_left(high, 4))


def _codes_q6_k(e, w, j):
    half, pair = j // 2, j % 2
    ql = e.load(i8x64, e.offset(w, 64 * half))
    low = e.mask(e.shift_halves(ql, 4 * pair, 4 * pair), 15)
    high = e.mask(e.shift_halves(e.twice(e.offset(w, 128 + 32 * half)), 4 * pair, 4 * pair + 2), 3)
    return e.b.add(e.b.or_(low, e.shift_left(high, 4)), e.const64(96))


_PAIR = [0] * 8 + [1] * 8


def _blocks32(codes, block_bytes):
    """Formats of 32-column blocks with one half-float scale at the front; symmetric."""

    def step(e, w, a, nb, at, acc, acc_min):
        scales = e.mul(e.halves_at(w, block_bytes), e.load(f32x8, e.offset(at, e.k)))
        sums = e.load(i32x8, e.offset(at, e.k, e.times(nb, 8)))
        for j in range(4):
            start = e.starts(sums, (2 * j, 2 * j + 1), 8)
            dot = e.dot(start, codes(e, w, j), e.load(i8x64, e.offset(a, 64 * j)))
            acc = e.fma(e.to_f32(dot), e.spread(scales, [2 * j + p for p in _PAIR]), acc)
        return acc, acc_min

    return step, 8 * block_bytes


def _k_with_min(codes, block_bytes):
    """q4_K and q5_K: 6-bit scales and minima per 32 columns."""

    def step(e, w, a, nb, at, acc, acc_min):
        packed = e.b.sitofp(packed_scales_6bit(e.b, e.offset(w, 4)), llvm_type(f32x16))
        sc = e.b.shuffle_vector(packed, packed, _indices(range(8)))
        mn = e.b.shuffle_vector(packed, packed, _indices(range(8, 16)))
        scales = e.mul(e.mul(sc, e.splat_half(w, f32x8)), e.load(f32x8, e.offset(at, e.k)))
        minima = e.mul(mn, e.splat_half(e.offset(w, 2), f32x8, -1))
        sums = e.load(f32x8, e.offset(at, e.k, e.times(nb, 4)))
        acc_min = e.fma8(minima, sums, acc_min)
        for j in range(4):
            dot = e.dot(e.zero(i32x16), codes(e, w, j), e.load(i8x64, e.offset(a, 64 * j)))
            acc = e.fma(e.to_f32(dot), e.spread(scales, [2 * j + p for p in _PAIR]), acc)
        return acc, acc_min

    return step, block_bytes


def _q6_k(e, w, a, nb, at, acc, acc_min):
    raw = e.b.sext(e.load(i8x16, e.offset(w, 192)), llvm_type(i32x16))
    scales = e.mul(e.to_f32(raw), e.splat_half(e.offset(w, 208), f32x16))
    d = e.load(f32x8, e.offset(at, e.k))
    sums = e.load(i32x16, e.offset(at, e.k, e.times(nb, 12), e.delta))
    for j in range(4):
        start = e.starts(sums, [4 * j + i for i in range(4)], 4)
        dot = e.dot(start, _codes_q6_k(e, w, j), e.load(i8x64, e.offset(a, 64 * j)))
        sc = e.mul(e.spread(scales, [4 * j + i // 4 for i in range(16)]), e.spread(d, [2 * j + p for p in _PAIR]))
        acc = e.fma(e.to_f32(dot), sc, acc)
    return acc, acc_min


STEPS = {
    "q8_0": _blocks32(_codes_q8_0, 34),
    "q4_0": _blocks32(_codes_q4_0, 18),
    "q5_0": _blocks32(_codes_q5_0, 22),
    "q4_K": _k_with_min(_codes_q4_k, 144),
    "q5_K": _k_with_min(_codes_q5_k, 176),
    "q6_K": (_q6_k, 210),
}


@functools.cache
def row_dot(type_name):
    """dot(w, a, k): the first k - k % 256 columns of the row times the activation row."""
    step, step_bytes = STEPS[type_name]

    @intrinsic
    def dot(typingctx, w, a, k):
        def codegen(context, builder, sig, args):
            w, a, k = args
            e = _Row(builder)
            e.k = k
            nb = builder.lshr(k, e.int(5))
            acc, acc_min = e.variable(e.zero(f32x16)), e.variable(const_vector(f32x8, [0.0] * 8))
            with e.loop(builder.lshr(k, e.int(8))) as i:
                e.delta = e.times(i, 32)  # i32 sums per 16 columns advance twice as fast as `at`
                at = e.offset(a, e.times(i, 32))
                more, more_min = step(e, e.offset(w, e.times(i, step_bytes)), e.offset(a, e.times(i, 256)), nb, at,
                                      builder.load(acc), builder.load(acc_min))  # fmt: skip
                builder.store(more, acc)
                builder.store(more_min, acc_min)
            total, low = builder.load(acc), builder.load(acc_min)
            lo = builder.shuffle_vector(total, total, _indices(range(8)))
            hi = builder.shuffle_vector(total, total, _indices(range(8, 16)))
            v, n = builder.fadd(builder.fadd(lo, hi), low), 8
            while n > 1:
                n //= 2
                x = builder.shuffle_vector(v, v, _indices(range(n)))
                v = builder.fadd(x, builder.shuffle_vector(v, v, _indices(range(n, 2 * n))))
            return builder.extract_element(v, ir.Constant(I32, 0))

        return types.float32(types.int64, types.int64, types.int64), codegen

    return dot
