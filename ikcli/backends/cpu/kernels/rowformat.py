"""Weight formats whose rows stand alone, described once and used twice.

A `RowFormat` says how 256 columns ("a step") of a stored row become 64-byte vectors of unsigned codes, scales, minima.
From that description two functions are generated as LLVM IR:

* `row_dot(format)`: the row times one quantized activation row, straight from memory (generation); `row_dots`: several,
* `unpack_row(format)`: the row as one lane of a 16-row tile (embeddings; prompts unpack 16 rows: `unpack_tile.py`).

Tile modes, and what a value is in each: `tile_modes.py`. For symmetric modes (s32, s16) codes are value + 128, and the
matching -128 * sum of the activations enters as the start of each integer dot product, so integer arithmetic is exact.
Activation rows: `kernels/activations.py`. The last step of a row may have fewer than 8 blocks of 32 columns: it is
copied to zero-filled memory first, so formats never see a partial step.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.tile_modes import LAYOUT, MODES
from ikcli.native.simd.emit import I32, I64, Emitter
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    f32x8,
    f32x16,
    half_to_f32,
    i8x16,
    i8x32,
    i8x64,
    i32x8,
    i32x16,
    llvm_type,
    pointer,
    splat_value,
)

_I8, _I16, _F32 = ir.IntType(8), ir.IntType(16), ir.FloatType()


def indices(values):
    """A constant shuffle mask."""
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


class RowEmitter(Emitter):
    """Operations that format descriptions are made of. Addresses are i64 values."""

    # --- loads --------------------------------------------------------------------------------------------------------
    def word(self, address, bits=32):
        """An unsigned integer of 8, 16, 32 or 64 bits, as i32 (i64 for 64)."""
        t = ir.IntType(bits)
        x = self.b.load(pointer(self.b, address, t), align=1)
        return x if bits >= 32 else self.b.zext(x, I32)

    def half(self, address):
        """A half float as f32."""
        return half_to_f32(self.b, self.b.load(pointer(self.b, address, _I16), align=1))

    def single(self, address):
        """A float."""
        return self.b.load(pointer(self.b, address, _F32), align=1)

    def halves_at(self, address, stride, count=8):
        """f32x8 (or x16) of half floats `stride` bytes apart."""
        v = ir.Constant(ir.VectorType(_I16, count), ir.Undefined)
        for i in range(count):
            x = self.b.load(pointer(self.b, self.offset(address, i * stride), _I16), align=1)
            v = self.b.insert_element(v, x, ir.Constant(I32, i))
        return half_to_f32(self.b, v)

    def load_bytes(self, address, count):
        """`count` unsigned bytes as i32 lanes."""
        t = ir.VectorType(_I8, count)
        return self.b.zext(self.b.load(pointer(self.b, address, t), align=1), ir.VectorType(I32, count))

    def vector_pointer(self, address, bits, count):
        """Pointer to a vector of integers."""
        return pointer(self.b, address, ir.VectorType(ir.IntType(bits), count))

    def gather64(self, words):
        """64 bytes from 8 i64 values."""
        v = ir.Constant(ir.VectorType(I64, 8), ir.Undefined)
        for i, x in enumerate(words):
            v = self.b.insert_element(v, x, self.index(i))
        return self.b.bitcast(v, llvm_type(i8x64))

    def lanes(self, values):
        """A constant shuffle mask."""
        return indices(values)

    def index(self, i):
        """A lane number."""
        return ir.Constant(I32, i)

    def zero8(self):
        return self.zero(f32x8)

    # --- f32 vectors --------------------------------------------------------------------------------------------------
    def splat(self, x, vec=f32x8):
        return splat_value(self.b, vec, x)

    def mul(self, x, y):
        return self.b.fmul(x, y)

    def ints_to_f32(self, v):
        """Signed i32 lanes as floats."""
        return self.b.sitofp(v, ir.VectorType(_F32, v.type.count))

    def bytes_to_f32(self, v, signed=True):
        """Byte lanes as floats."""
        wide = ir.VectorType(I32, v.type.count)
        return self.ints_to_f32(self.b.sext(v, wide) if signed else self.b.zext(v, wide))

    def pick(self, v, lanes):
        """Lanes of v in any order and number."""
        return self.b.shuffle_vector(v, v, indices(lanes))

    def fused(self, a, b, c):
        """a*b + c for f32 vectors of any length."""
        return call_llvm(self.b, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])

    # --- i32 vectors --------------------------------------------------------------------------------------------------
    def splat_int(self, x, vec=i32x8):
        return splat_value(self.b, vec, x)

    def ints(self, values, vec=i32x8):
        return const_vector(vec, values)

    def lshr(self, v, amounts):
        """i32 lanes shifted right by constants."""
        return self.b.lshr(v, ir.Constant(v.type, [ir.Constant(I32, a) for a in amounts]))

    def all_and(self, v, m):
        """Every lane (of any integer width) and m."""
        return self.b.and_(v, ir.Constant(v.type, [ir.Constant(v.type.element, m)] * v.type.count))

    # --- 64 codes -----------------------------------------------------------------------------------------------------
    def const64(self, x):
        return const_vector(i8x64, [x] * 64)

    def join(self, lo, hi):
        """Two 32-byte vectors as one of 64."""
        return self.b.shuffle_vector(lo, hi, indices(range(64)))

    def twice(self, address):
        """The same 32 bytes in both halves."""
        return self.pick(self.load(i8x32, address), [*range(32), *range(32)])

    def shift_right(self, v, amounts):
        """64 bytes as 16 i32 lanes, shifted right by 16 constants (bits leak between bytes: mask afterwards)."""
        words = self.b.bitcast(v, llvm_type(i32x16))
        return self.b.bitcast(self.b.lshr(words, const_vector(i32x16, amounts)), llvm_type(i8x64))

    def shift_halves(self, v, lo, hi):
        """shift_right by lo in the first 32 bytes, hi in the others."""
        return self.shift_right(v, [lo] * 8 + [hi] * 8)

    def shift_left(self, v, n):
        words = self.b.bitcast(v, llvm_type(i32x16))
        return self.b.bitcast(self.b.shl(words, const_vector(i32x16, [n] * 16)), llvm_type(i8x64))

    def nibble_pair(self, w, j, block_bytes, at):
        """Codes of blocks 2j, 2j+1 of 32 columns stored as 16 bytes each (low nibbles = first 16 columns)."""
        first, second = (self.load(i8x16, self.offset(w, block_bytes * b + at)) for b in (2 * j, 2 * j + 1))
        order = [*range(16), *range(16), *range(16, 32), *range(16, 32)]
        both = self.b.shuffle_vector(first, second, indices(order))
        return self.all_and(self.shift_right(both, [0] * 4 + [4] * 4 + [0] * 4 + [4] * 4), 15)

    def bit_mask(self, lo, hi):
        """<64 x i1> from two i32 words."""
        both = self.b.or_(self.b.zext(lo, I64), self.b.shl(self.b.zext(hi, I64), ir.Constant(I64, 32)))
        return self.b.bitcast(both, ir.VectorType(ir.IntType(1), 64))

    def mask_of(self, word64):
        """<64 x i1> from an i64."""
        return self.b.bitcast(word64, ir.VectorType(ir.IntType(1), 64))

    def lookup16(self, table, codes):
        """table[code] (16 byte constants) for 64 codes 0..15."""
        table = [x & 255 for x in table]
        if "avx512bw" in self.features():
            return call_llvm(self.b, "llvm.x86.avx512.pshuf.b.512", codes.type, [const_vector(i8x64, table * 4), codes])
        if "avx2" in self.features():
            lo, hi = (self.b.shuffle_vector(codes, codes, indices(range(o, o + 32))) for o in (0, 32))
            t = const_vector(i8x32, table * 2)
            return self.join(*(call_llvm(self.b, "llvm.x86.avx2.pshuf.b", t.type, [t, half]) for half in (lo, hi)))
        out = self.const64(table[0])
        for i in range(1, 16):
            is_i = self.b.icmp_unsigned("==", codes, self.const64(i))
            out = self.b.select(is_i, self.const64(table[i]), out)
        return out

    def table(self, values, bits, name):
        """A constant array in the kernel's data section; returns its address (i64)."""
        name = f"ik.table.{name}"
        module = self.b.module
        if name not in module.globals:
            t = ir.ArrayType(ir.IntType(bits), len(values))
            g = ir.GlobalVariable(module, t, name)
            g.linkage, g.global_constant = "internal", True
            g.initializer = ir.Constant(t, [ir.Constant(ir.IntType(bits), int(x)) for x in values])
        return self.b.ptrtoint(module.globals[name], I64)

    def entry(self, table, index, bits):
        """table[index] of a `table` of this width."""
        at = self.b.add(table, self.b.mul(self.b.zext(index, I64), self.int(bits // 8)))
        return self.b.load(pointer(self.b, at, ir.IntType(bits)), align=bits // 8)


class RowFormat:
    """One format. `w` is the address of a step's bytes, `row` what `header` returned (a row scale, or None)."""

    name = ""
    step_bytes = 0  # bytes of 256 columns
    block_bytes = 0  # bytes of the smallest stored unit ...
    block_columns = 256  # ... and its columns
    header_bytes = 0

    def header(self, e, w):
        """Reads the row header."""

    def codes(self, e, w, j):
        """Unsigned codes of columns 64j .. 64j+63 as i8x64."""
        raise NotImplementedError

    def scales(self, e, w, row):
        """f32x8 (modes *32) or f32x16 (modes *16)."""
        raise NotImplementedError

    def minima(self, e, w, row):
        """As scales, for modes m32 and m16."""
        raise NotImplementedError


_PAIR = [0] * 8 + [1] * 8
_PREFETCH_BYTES = 4096  # ahead; the next rows follow in memory


@functools.cache
def row_dot(fmt):
    """dot(w, a, k) -> float32."""

    @intrinsic
    def dot(typingctx, w, a, k):
        def codegen(context, builder, sig, args):
            w, a, k = args
            return _dots(RowEmitter(builder), fmt, w, [a], k)[0]

        return types.float32(types.int64, types.int64, types.int64), codegen

    return dot


@functools.cache
def row_dots(fmt, n):
    """dots(w, a, a_stride, k, out, out_stride): n activation rows at once, each with the result of `row_dot`."""

    @intrinsic
    def dots(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, k, out, out_stride = args
            e = RowEmitter(builder)
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(n)]
            for t, total in enumerate(_dots(e, fmt, w, rows, k)):
                to = e.offset(out, e.times(out_stride, t))
                builder.store(total, pointer(builder, to, _F32), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dots


def _dots(e, fmt, w, rows, k):
    """The row at w times every activation row; weights are decoded once for all of them."""
    e.k = k
    accs = [[e.variable(e.zero(f32x16)) for _ in range(2)] for _ in rows]
    row = fmt.header(e, w)
    nb = e.b.lshr(k, e.int(5))
    for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
        for line in range(0, fmt.step_bytes, 64):
            e.prefetch(e.offset(at_w, _PREFETCH_BYTES + line))
        weights = _Step(e, fmt, at_w, row)
        for a, acc in zip(rows, accs, strict=True):
            _dot_step(e, weights, _Activation(e, a, i, nb, valid, weights.mode), acc)
    return [_sum_lanes(e, e.b.fadd(e.b.load(acc), e.b.load(low))) for acc, low in accs]


class _Step:
    """256 decoded columns of a weight row."""

    def __init__(self, e, fmt, w, row):
        self.mode = MODES[fmt.name]
        self.scales = fmt.scales(e, w, row)
        self.minima = None
        if self.mode == "m32":
            self.minima = _widen(e, fmt.minima(e, w, row))
        elif self.mode == "m16":
            self.minima = e.mul(fmt.minima(e, w, row), const_vector(f32x16, [-1.0 / 128] * 16))
        self.codes = [fmt.codes(e, w, j) for j in range(4)]


class _Activation:
    """The same columns of an activation row (layout: `kernels/activations.py`)."""

    def __init__(self, e, a, i, nb, valid, mode):
        i32 = e.times(i, 32)
        self.codes_at, at = e.offset(a, e.times(i, 256)), e.offset(a, i32)
        self.d = activation_floats(e, e.offset(at, e.k), valid)
        self.starts = self.sums = None
        if mode == "s32":
            self.starts = e.load(i32x8, e.offset(at, e.k, e.times(nb, 8)))
        elif mode != "m32":
            self.starts = e.load(i32x16, e.offset(at, i32, e.k, e.times(nb, 12)))
        if mode == "m32":
            self.sums = _widen(e, activation_floats(e, e.offset(at, e.k, e.times(nb, 4)), valid))
        elif mode == "m16":
            self.sums = e.mul(e.ints_to_f32(self.starts), e.pick(self.d, [i // 2 for i in range(16)]))


def _dot_step(e, weights, x, accs):
    acc, low = (e.b.load(s) for s in accs)
    mode, scales = weights.mode, weights.scales
    if x.sums is not None:
        low = e.fused(weights.minima, x.sums, low)
    if mode.endswith("32"):
        scales = e.mul(scales, x.d)
    for j in range(4):
        dot = e.dot(_starts(e, mode, x.starts, j), weights.codes[j], e.load(i8x64, e.offset(x.codes_at, 64 * j)))
        if mode.endswith("32"):
            sc = e.pick(scales, [2 * j + p for p in _PAIR])
        else:
            sc = e.mul(e.pick(scales, [4 * j + i // 4 for i in range(16)]), e.pick(x.d, [2 * j + p for p in _PAIR]))
        acc = e.fused(e.to_f32(dot), sc, acc)
    e.b.store(acc, accs[0])
    e.b.store(low, accs[1])


def _widen(e, v):
    """f32x8 as f32x16 with zeros above."""
    return e.b.shuffle_vector(v, e.zero(f32x8), indices(range(16)))


def _starts(e, mode, sums, j):
    """Start value of the dot product of columns 64j..: sums in the first lane of each block, or zeros."""
    if mode.startswith("m"):
        return e.zero(i32x16)
    per, n = (8, 2) if mode == "s32" else (4, 4)
    outside = sums.type.count
    lanes = [n * j + i // per if i % per == 0 else outside for i in range(16)]
    return e.b.shuffle_vector(sums, ir.Constant(sums.type, [0] * outside), indices(lanes))


def activation_floats(e, address, valid):
    """8 floats of the activation row; only the first `valid` ones in a partial step."""
    if valid is None:
        return e.load(f32x8, address)
    limit = splat_value(e.b, i32x8, e.b.trunc(valid, I32))
    mask = e.b.icmp_signed("<", const_vector(i32x8, range(8)), limit)
    t = llvm_type(f32x8)
    args = [pointer(e.b, address, t), ir.Constant(I32, 1), mask, e.zero(f32x8)]
    return call_llvm(e.b, "llvm.masked.load.v8f32.p0", t, args)


def steps(e, fmt, w, k):
    """Yields (step index, address, None) inside a loop over whole steps, then (.., .., valid blocks) for the rest."""
    whole = e.b.lshr(k, e.int(8))
    with e.loop(whole) as i:
        yield i, e.offset(w, e.times(i, fmt.step_bytes)), None
    if fmt.block_columns == 256:
        return
    rest = e.b.and_(k, e.int(255))
    with e.b.if_then(e.b.icmp_signed("!=", rest, e.int(0))):
        with e.b.goto_entry_block():
            copy = e.b.alloca(ir.ArrayType(_I8, fmt.step_bytes))
        e.b.store(ir.Constant(ir.ArrayType(_I8, fmt.step_bytes), None), copy)
        at = e.b.ptrtoint(copy, I64)
        src = e.offset(w, e.times(whole, fmt.step_bytes))
        copy_blocks(e, fmt, src, at, e.b.udiv(rest, e.int(fmt.block_columns)))
        yield whole, at, e.b.lshr(rest, e.int(5))


def copy_blocks(e, fmt, src, to, n_blocks):
    """n_blocks stored units, eight bytes at a time; the last move of a unit overlaps the one before."""
    wide = min(8, fmt.block_bytes)
    t = ir.IntType(8 * wide)
    starts = [*range(0, fmt.block_bytes - wide, wide), fmt.block_bytes - wide]
    with e.loop(n_blocks) as i:
        at = e.times(i, fmt.block_bytes)
        for s in starts:
            x = e.b.load(pointer(e.b, e.offset(src, at, s), t), align=1)
            e.b.store(x, pointer(e.b, e.offset(to, at, s), t), align=1)


def _sum_lanes(e, v):
    n = v.type.count
    while n > 1:
        n //= 2
        v = e.b.fadd(e.pick(v, range(n)), e.pick(v, range(n, 2 * n)))
    return e.b.extract_element(v, ir.Constant(I32, 0))


@functools.cache
def unpack_row(fmt):
    """unpack(w, tile, r, k): lane r of the tile; writes whole steps (the tile has room for them)."""
    mode = MODES[fmt.name]
    header, block_bytes = LAYOUT[mode]
    halves = 2 if mode.endswith("16") else 1

    def put(e, values, tile, at):
        """Lane i of a scale vector to block i // halves."""
        for i in range(8 * halves):
            x = e.b.extract_element(values, ir.Constant(I32, i))
            to = e.offset(tile, i // halves * block_bytes + at + 64 * (i % halves))
            e.b.store(x, pointer(e.b, to, _F32), align=4)

    @intrinsic
    def unpack(typingctx, w, tile, r, k):
        def codegen(context, builder, sig, args):
            w, tile, r, k = args
            e = RowEmitter(builder)
            row = fmt.header(e, w)
            lane = e.offset(tile, e.times(r, 4))
            for i, at_w, _ in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                to = e.offset(lane, e.times(i, 8 * block_bytes))
                put(e, fmt.scales(e, at_w, row), to, 0)
                if mode.startswith("m"):
                    put(e, fmt.minima(e, at_w, row), to, 64 * halves)
                for j in range(4):
                    words = builder.bitcast(fmt.codes(e, at_w, j), llvm_type(i32x16))
                    for n in range(16):
                        x = builder.extract_element(words, ir.Constant(I32, n))
                        at = e.offset(to, (2 * j + n // 8) * block_bytes + header + 64 * (n % 8))
                        builder.store(x, pointer(builder, at, I32), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return unpack
